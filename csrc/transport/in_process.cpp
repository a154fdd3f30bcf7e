#include "transport/in_process.hpp"

#include <atomic>
#include <mutex>
#include <utility>

#include "base/workers.hpp"
#include "transport/gate.hpp"

namespace torch_iroh::transport {
namespace {

// What waits for one rank. Deliveries run on a strand: in the order of sending, and never inside the sender's call.
class Mailbox : public std::enable_shared_from_this<Mailbox> {
 public:
  using Deliver = std::function<void(Receiver&)>;

  Mailbox() : strand_(std::make_shared<Strand>(workers())) {}

  void post(Deliver deliver) {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    if (started_) {
      run(std::move(deliver));
    } else {
      early_.push_back(std::move(deliver));
    }
  }

  void start(Receiver& receiver) {
    gate_.open(receiver);
    const std::lock_guard lock(mutex_);
    started_ = true;
    for (Deliver& deliver : early_) run(std::move(deliver));
    early_.clear();
  }

  void close() {
    std::vector<Deliver> dropped;  // their payloads may call back into senders
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
      dropped.swap(early_);
    }
    gate_.close();
  }

 private:
  void run(Deliver deliver) {
    strand_->post([self = shared_from_this(), deliver = std::move(deliver)] { self->gate_.with(deliver); });
  }

  const std::shared_ptr<Strand> strand_;
  ReceiverGate gate_;
  std::mutex mutex_;
  std::vector<Deliver> early_;
  bool started_ = false;
  bool closed_ = false;
};

class InProcess final : public Transport {
 public:
  InProcess(int rank, std::shared_ptr<std::vector<std::shared_ptr<Mailbox>>> boxes)
      : rank_(rank), boxes_(std::move(boxes)), sent_(boxes_->size()) {}
  ~InProcess() override { close({}); }

  int rank() const override { return rank_; }
  int world() const override { return static_cast<int>(boxes_->size()); }
  void start(Receiver& receiver) override { box(rank_).start(receiver); }

  void send(int peer, const Tag& tag, std::span<const std::byte> bytes, SendDone done) override {
    if (severed_) return done(Error(ErrorKind::aborted, "this rank was severed"));
    sent_[static_cast<std::size_t>(peer)] += bytes.size();
    const std::shared_ptr<const void> lent(bytes.data(), [done = std::move(done)](const void*) { done(Nothing{}); });
    box(peer).post([from = rank_, tag, payload = Payload(bytes, lent)](Receiver& receiver) mutable {
      receiver.on_data(from, tag, std::move(payload));
    });
  }

  void send_control(int peer, std::vector<std::byte> bytes) override {
    if (severed_) return;
    box(peer).post(
        [from = rank_, payload = Payload::copy_of(bytes)](Receiver& receiver) { receiver.on_control(from, payload); });
  }

  void connect(int) override {}
  bool connected(int) const override { return true; }

  bool may_wait_for_receiver() const override { return false; }  // worker threads, and the memory is the sender's

  void close(Duration) override {
    if (closed_.exchange(true)) return;
    box(rank_).close();
    announce(true, Error(ErrorKind::peer_gone, "it left the group"));
  }

  std::vector<PeerStats> stats() const override {
    std::vector<PeerStats> all;
    for (int i = 0; i < world(); ++i) {
      if (i != rank_) all.push_back({i, "", "in process", 0.0, sent_[static_cast<std::size_t>(i)], 0});
    }
    return all;
  }

  void sever(const std::string& why) {
    if (!severed_.exchange(true)) announce(false, Error(ErrorKind::peer_gone, why));
  }

 private:
  Mailbox& box(int rank) { return *(*boxes_)[static_cast<std::size_t>(rank)]; }

  void announce(bool left, const Error& cause) {
    for (int i = 0; i < world(); ++i) {
      if (i == rank_) continue;
      box(i).post([from = rank_, left, cause](Receiver& receiver) { receiver.on_lost(from, left, cause); });
    }
  }

  const int rank_;
  const std::shared_ptr<std::vector<std::shared_ptr<Mailbox>>> boxes_;
  std::vector<std::atomic<std::uint64_t>> sent_;
  std::atomic<bool> severed_{false};
  std::atomic<bool> closed_{false};
};

}  // namespace

std::vector<std::shared_ptr<Transport>> make_in_process(int world) {
  auto boxes = std::make_shared<std::vector<std::shared_ptr<Mailbox>>>();
  for (int i = 0; i < world; ++i) boxes->push_back(std::make_shared<Mailbox>());
  std::vector<std::shared_ptr<Transport>> ends;
  for (int i = 0; i < world; ++i) ends.push_back(std::make_shared<InProcess>(i, boxes));
  return ends;
}

void sever(Transport& in_process, const std::string& why) {
  dynamic_cast<InProcess&>(in_process).sever(why);
}

}  // namespace torch_iroh::transport
