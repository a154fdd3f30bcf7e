// The verdict over a silent peer, as lists of events on a virtual clock.
#include <doctest/doctest.h>

#include <random>
#include <string>
#include <vector>

#include "link/liveness.hpp"

namespace {

using namespace torch_iroh;
using link::Liveness;
using link::Verdict;

constexpr milliseconds kTimeout(3000);
const TimePoint kStart = TimePoint{} + std::chrono::hours(1);

struct Event {
  enum Kind : char { frame = 'f', timer = 't', forgive = 'g' } kind;
  int at_ms;                       // since the start; forgive: how long the pause was
  Verdict after = Verdict::alive;  // what a timer must find
};

const char* name_of(Verdict verdict) {
  return verdict == Verdict::alive ? "alive" : verdict == Verdict::suspect ? "suspect" : "dead";
}

std::string text_of(const std::vector<Event>& events) {
  std::string text;
  for (const Event& event : events) text += std::string(1, event.kind) + std::to_string(event.at_ms) + " ";
  return text;
}

void expect(const std::vector<Event>& events) {
  Liveness liveness(kTimeout, kStart);
  for (std::size_t i = 0; i < events.size(); ++i) {
    const Event& event = events[i];
    const TimePoint now = kStart + milliseconds(event.at_ms);
    if (event.kind == Event::frame) liveness.on_frame(now);
    if (event.kind == Event::forgive) liveness.forgive(milliseconds(event.at_ms));
    if (event.kind != Event::timer) continue;
    const Verdict verdict = liveness.on_timer(now);
    CHECK_MESSAGE(verdict == event.after, "event ", i, " of ", text_of(events), "gave ", name_of(verdict), ", not ",
                  name_of(event.after));
  }
}

constexpr auto alive = Verdict::alive;
constexpr auto suspect = Verdict::suspect;
constexpr auto dead = Verdict::dead;
constexpr auto frame = Event::frame;
constexpr auto timer = Event::timer;
constexpr auto forgive = Event::forgive;

}  // namespace

TEST_CASE("liveness: quiet for half the timeout is suspect, for the timeout is dead, to the millisecond") {
  expect(
      {{timer, 0, alive}, {timer, 1499, alive}, {timer, 1500, suspect}, {timer, 2999, suspect}, {timer, 3000, dead}});
  expect({{timer, 3000, dead}});  // also without a timer in between
}

TEST_CASE("liveness: any frame makes a suspect alive, and starts the silence anew") {
  expect({{timer, 2999, suspect},
          {frame, 2999},
          {timer, 2999, alive},
          {timer, 4498, alive},
          {timer, 4499, suspect},
          {frame, 5000},
          {timer, 6499, alive},
          {timer, 8000, dead}});
}

TEST_CASE("liveness: dead is final") {
  expect({{timer, 3000, dead}, {frame, 3001}, {timer, 3001, dead}, {forgive, 9000}, {timer, 3002, dead}});
}

TEST_CASE("liveness: no timer, no verdict: a frame that comes in time by its own clock saves the peer") {
  expect({{frame, 10'000}, {timer, 10'001, alive}});
}

TEST_CASE("liveness: this process's own pause is not held against the peer") {
  expect({{forgive, 10'000}, {timer, 11'499, alive}, {timer, 11'500, suspect}, {timer, 13'000, dead}});
  expect({{timer, 2000, suspect}, {forgive, 5000}, {timer, 7999, suspect}, {timer, 8000, dead}});
  expect({{timer, 2000, suspect}, {forgive, 5000}, {frame, 7000}, {timer, 8499, alive}, {timer, 10'000, dead}});
  expect({{forgive, 0}, {timer, 3000, dead}});
}

TEST_CASE("liveness: quiet_for counts from the last frame, without forgiven time") {
  Liveness liveness(kTimeout, kStart);
  CHECK(liveness.quiet_for(kStart + milliseconds(700)) == milliseconds(700));
  liveness.on_frame(kStart + milliseconds(700));
  CHECK(liveness.quiet_for(kStart + milliseconds(900)) == milliseconds(200));
  liveness.forgive(milliseconds(150));
  CHECK(liveness.quiet_for(kStart + milliseconds(900)) == milliseconds(50));
}

TEST_CASE("liveness: random events follow the picture above the class") {
  for (unsigned seed = 0; seed < 2000; ++seed) {
    std::mt19937 random(seed);
    std::vector<Event> events;
    int now = 0, heard = 0;
    Verdict verdict = alive;
    for (int i = 0; i < 30; ++i) {
      now += static_cast<int>(random() % 1200);
      const auto dice = random() % 8;
      if (dice == 0) {
        events.push_back({frame, now});
        if (verdict != dead) heard = now, verdict = alive;
      } else if (dice == 1) {
        const int pause = static_cast<int>(random() % 2000);
        events.push_back({forgive, pause});
        now += pause, heard += pause;
      } else {
        if (verdict != dead && now - heard >= 1500) verdict = suspect;
        if (now - heard >= 3000) verdict = dead;
        events.push_back({timer, now, verdict});
      }
    }
    INFO("seed ", seed);
    expect(events);
  }
}
