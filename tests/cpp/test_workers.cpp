// The threads under everything: tasks, timers and strands.
#include <doctest/doctest.h>

#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "base/patient_workers.hpp"
#include "base/workers.hpp"
#include "support.hpp"

namespace {

using namespace torch_iroh;
using namespace torch_iroh::testing;

// Opens once; waiting for it has a limit.
class Latch {
 public:
  void open() { outcome_.set(nullptr); }
  bool wait() { return outcome_.wait(); }

 private:
  Outcome outcome_;
};

double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

}  // namespace

TEST_CASE("strand: tasks of many threads run one at a time, each thread's in its order") {
  constexpr int kPosters = 8;
  const int each = kSanitized ? 500 : 4000;
  std::vector<std::pair<int, int>> seen;  // written without a lock: the strand is the lock
  {
    Workers workers(4);
    const auto strand = std::make_shared<Strand>(workers);
    std::vector<std::thread> posters;
    for (int poster = 0; poster < kPosters; ++poster) {
      posters.emplace_back([&, poster] {
        for (int i = 0; i < each; ++i) strand->post([&, poster, i] { seen.emplace_back(poster, i); });
      });
    }
    for (std::thread& poster : posters) poster.join();
  }  // runs what is queued
  CHECK(seen.size() == static_cast<std::size_t>(kPosters * each));
  std::vector<int> next(kPosters);
  int wrong = 0;
  for (const auto& [poster, i] : seen) wrong += next[static_cast<std::size_t>(poster)]++ != i;
  CHECK(wrong == 0);
}

TEST_CASE("strand: a task that posts to its own strand comes after what is there") {
  std::vector<int> seen;
  Latch end;
  Workers workers(2);
  const auto strand = std::make_shared<Strand>(workers);
  strand->post([&] {
    strand->post([&] { seen.push_back(2), end.open(); });
    seen.push_back(1);
  });
  CHECK(end.wait());
  CHECK(seen == std::vector<int>{1, 2});
}

TEST_CASE("strand: two strands progress independently") {
  Workers workers(2);
  const auto first = std::make_shared<Strand>(workers);
  const auto second = std::make_shared<Strand>(workers);
  Latch freed, end;
  first->post([&] { CHECK(freed.wait()); });  // holds its strand until the other has moved
  first->post([&] { end.open(); });
  second->post([&] { freed.open(); });
  CHECK(end.wait());
}

TEST_CASE("strand: a busy strand does not starve another one on the same thread") {
  std::atomic<int> busy{0};
  int at = -1;
  Latch start, end;
  Workers workers(1);
  const auto first = std::make_shared<Strand>(workers);
  const auto second = std::make_shared<Strand>(workers);
  workers.post([&] { CHECK(start.wait()); });
  for (int i = 0; i < 1000; ++i) first->post([&] { ++busy; });
  second->post([&] { at = busy, end.open(); });
  start.open();
  CHECK(end.wait());
  CHECK(at < 100);
}

TEST_CASE("workers: timers run in order of time, then of making") {
  std::vector<std::pair<int, int>> seen;  // (milliseconds, number)
  const int count = 300;
  Latch end;
  Workers workers(1);
  const TimePoint start = Clock::now() + milliseconds(20);
  std::mt19937 random(4);
  for (int i = 0; i < count; ++i) {
    const int wait = static_cast<int>(random() % 60);
    workers.at(start + milliseconds(wait), [&, wait, i] {
      CHECK(Clock::now() >= start + milliseconds(wait));
      seen.emplace_back(wait, i);
    });
  }
  workers.at(start + milliseconds(61), [&] { end.open(); });
  CHECK(end.wait());
  CHECK(seen.size() == count);
  CHECK(std::is_sorted(seen.begin(), seen.end()));
}

TEST_CASE("workers: an earlier timer made later wakes a sleeping worker") {
  Latch end;
  Workers workers(1);
  workers.at(Clock::now() + std::chrono::hours(1), [] {});
  workers.at(kNever, [] {});
  std::this_thread::sleep_for(milliseconds(20));
  const TimePoint begin = Clock::now();
  workers.at(begin + milliseconds(10), [&] { end.open(); });
  CHECK(end.wait());
  CHECK(Clock::now() - begin < milliseconds(5000));
}

TEST_CASE("workers: a timer in the past runs at once, before queued tasks") {
  std::vector<int> seen;
  Latch start, end;
  Workers workers(1);
  workers.post([&] { CHECK(start.wait()); });
  workers.post([&] { seen.push_back(2), end.open(); });
  workers.at(TimePoint{}, [&] { seen.push_back(1); });
  start.open();
  CHECK(end.wait());
  CHECK(seen == std::vector<int>{1, 2});
}

TEST_CASE("workers: cancel says whether the timer will run") {
  std::atomic<int> ran{0};
  Workers workers(2);
  const auto far = workers.at(Clock::now() + std::chrono::hours(1), [&] { ++ran; });
  CHECK(workers.cancel(far));
  CHECK_FALSE(workers.cancel(far));
  CHECK_FALSE(workers.cancel(0));
  CHECK_FALSE(workers.cancel(123'456));
  Latch end;
  const auto near = workers.at(Clock::now(), [&] { ++ran, end.open(); });
  CHECK(end.wait());
  CHECK_FALSE(workers.cancel(near));
  CHECK(ran == 1);

  // In a race exactly one of the two happens.
  int cancelled = 0;
  const int count = kSanitized ? 500 : 3000;
  for (int i = 0; i < count; ++i) {
    const auto id = workers.at(Clock::now() + std::chrono::microseconds(i % 50), [&] { ++ran; });
    if (i % 3 == 0) std::this_thread::yield();
    cancelled += workers.cancel(id);
  }
  CHECK(eventually([&] { return ran == 1 + count - cancelled; }));
}

TEST_CASE("workers: what a cancelled timer holds may post when it is destroyed") {
  Latch end;
  Workers workers(1);
  const std::shared_ptr<void> last(nullptr, [&](void*) { workers.post([&] { end.open(); }); });
  auto id = workers.at(Clock::now() + std::chrono::hours(1), [held = last] {});
  const_cast<std::shared_ptr<void>&>(last).reset();
  CHECK(workers.cancel(id));
  CHECK(end.wait());
}

TEST_CASE("workers: the end runs what is queued and drops timers") {
  std::atomic<int> tasks{0}, timers{0};
  const auto held = std::make_shared<int>(0);
  {
    Workers workers(2);
    for (int i = 0; i < 100; ++i) workers.post([&] { std::this_thread::yield(), ++tasks; });
    for (int i = 0; i < 100; ++i) workers.at(Clock::now() + std::chrono::hours(1), [&, held] { ++timers; });
    CHECK(held.use_count() == 101);
  }
  CHECK(tasks == 100);
  CHECK(timers == 0);
  CHECK(held.use_count() == 1);
}

TEST_CASE("workers: a throwing task does not end its worker") {
  Latch end;
  Workers workers(1);
  for (int i = 0; i < 3; ++i) workers.post([] { throw std::runtime_error("on purpose, by a test"); });
  workers.at(Clock::now(), [] { throw Error(ErrorKind::invalid, "on purpose, by a test"); });
  workers.at(Clock::now() + milliseconds(5), [&] { end.open(); });
  CHECK(end.wait());
}

TEST_CASE("strand: a throwing task does not end its strand") {
  Latch end;
  Workers workers(1);
  const auto strand = std::make_shared<Strand>(workers);
  strand->post([] { throw std::runtime_error("on purpose, by a test"); });
  strand->post([&] { end.open(); });
  CHECK(end.wait());
}

TEST_CASE("workers: what a throwing task holds may post when it is destroyed") {
  Latch end;
  Workers workers(2);
  std::shared_ptr<void> held(nullptr, [&](void*) { workers.post([&] { end.open(); }); });
  workers.post([held = std::move(held)] { throw std::runtime_error("on purpose, by a test"); });
  CHECK(end.wait());
}

#ifndef __SANITIZE_THREAD__  // which ends a forked child that makes threads
TEST_CASE("workers: a forked child has threads of its own") {
  Latch before;
  workers().post([&] { before.open(); });
  CHECK(before.wait());
  const pid_t child = fork();
  if (child == 0) {
    Latch end;
    workers().at(Clock::now() + milliseconds(1), [&] { end.open(); });
    _exit(end.wait() ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}
#endif

TEST_CASE("workers: idle workers use no CPU") {
  Workers workers(8);
  const auto strand = std::make_shared<Strand>(workers);
  Latch end;
  workers.at(Clock::now() + std::chrono::hours(1), [] {});
  strand->post([&] { end.open(); });
  CHECK(end.wait());
  std::this_thread::sleep_for(milliseconds(20));
  const double before = cpu_seconds();
  std::this_thread::sleep_for(milliseconds(300));
  // Eight threads that spin would use all cores; one that polls every millisecond about 5 ms.
  CHECK(cpu_seconds() - before < 0.060);
}

TEST_CASE("patient workers: tasks that wait for later ones get a thread each, quick ones share one") {
  PatientWorkers workers(8);
  Latch innermost;
  std::function<void(int)> nest = [&](int depth) {
    if (depth == 0) return innermost.open();
    Latch inner;
    workers.post([&, depth] {
      nest(depth - 1);
      inner.open();
    });
    inner.wait();
  };
  Latch end;
  workers.post([&] {
    nest(5);
    end.open();
  });
  CHECK(end.wait());
  CHECK(innermost.wait());
  CHECK(workers.threads() <= 7);

  PatientWorkers quick(8);
  std::atomic<int> done = 0;
  for (int i = 0; i < 10'000; ++i) quick.post([&] { ++done; });
  CHECK(eventually([&] { return done == 10'000; }));
  CHECK(quick.threads() <= 2);
}

TEST_CASE("patient workers: idle is when the last task has ended, and its captures are gone") {
  PatientWorkers workers(2);
  CHECK(workers.wait_until_idle(milliseconds(0)));
  Latch end;
  const auto kept = std::make_shared<int>(1);
  workers.post([&end, kept] { end.wait(); });
  CHECK_FALSE(workers.wait_until_idle(milliseconds(20)));
  end.open();
  CHECK(workers.wait_until_idle(kPatience));
  CHECK(kept.use_count() == 1);
}

TEST_CASE("patient workers: no more threads than allowed, and everything queued runs before the end") {
  std::atomic<int> done = 0;
  {
    PatientWorkers workers(2);
    for (int i = 0; i < 6; ++i) {
      workers.post([&] {
        std::this_thread::sleep_for(milliseconds(30));
        ++done;
      });
    }
    std::this_thread::sleep_for(milliseconds(40));
    CHECK(workers.threads() <= 2);
  }
  CHECK(done == 6);
}
