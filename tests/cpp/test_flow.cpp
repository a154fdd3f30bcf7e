// Lanes that move from stream to stream: nothing is lost, doubled or out of order, and lent bytes are given back once.
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "iroh_support.hpp"
#include "link/receive_flow.hpp"
#include "link/send_flow.hpp"

namespace {

using namespace torch_iroh;
using namespace torch_iroh::testing;
using link::FrameHeader;
using link::FrameType;
using link::ReceiveFlow;
using link::RecvLane;
using link::SendFlow;
using link::SendLane;
using Bytes = std::vector<std::byte>;

FrameHeader header_of(std::uint32_t sequence, std::size_t size) {
  FrameHeader header{.type = FrameType::data};
  header.length = static_cast<std::uint32_t>(size);
  header.sequence = sequence;
  return header;
}

// The receiving end of one lane, whatever streams bring it.
struct Receiver : std::enable_shared_from_this<Receiver> {
  ReceiveFlow flow;
  std::mutex mutex;
  std::vector<std::uint64_t> delivered;
  int duplicates = 0;
  int spoiled = 0;
  std::optional<Error> failed;

  void deliver(const FrameHeader& header, const Payload& payload) {
    const std::lock_guard lock(mutex);
    delivered.push_back(header.sequence);
    for (const std::byte byte : payload.bytes()) spoiled += byte != static_cast<std::byte>(header.sequence) ? 1 : 0;
  }
  void read(iroh::RecvStream stream) {
    auto on_frame = [self = shared_from_this()](const FrameHeader& header, Payload payload) {
      switch (self->flow.offer(header, payload)) {
        case ReceiveFlow::Offer::deliver:
          self->deliver(header, payload);
          while (auto more = self->flow.take()) self->deliver(more->first, more->second);
          break;
        case ReceiveFlow::Offer::waits: break;
        case ReceiveFlow::Offer::duplicate: {
          const std::lock_guard lock(self->mutex);
          ++self->duplicates;
        }
      }
      return true;
    };
    auto on_end = [self = shared_from_this()](const std::optional<Error>& error) {
      const std::lock_guard lock(self->mutex);
      if (error && error->kind() == ErrorKind::protocol) self->failed = error;
    };
    std::make_shared<RecvLane>(std::move(stream), on_frame, on_end)->start();
  }
  std::size_t count() {
    const std::lock_guard lock(mutex);
    return delivered.size();
  }
};

// The streams from dialer to listener, in the order in which they were opened; some are read, others are left alone.
class Streams {
 public:
  Streams(ConnectedPair& pair, std::shared_ptr<Receiver> receiver) : pair_(pair), receiver_(std::move(receiver)) {
    accept(pair.accepted, receiver_, reads_, 0);
  }
  std::shared_ptr<SendLane> open(bool read) {
    {
      const std::lock_guard lock(reads_->mutex);
      reads_->flags.push_back(read);
    }
    return std::make_shared<SendLane>(pair_.dialed.open_uni().get(soon()));
  }

 private:
  struct Reads {
    std::mutex mutex;
    std::vector<bool> flags;
    std::vector<iroh::RecvStream> ignored;
  };
  // One at a time: of two that wait at once, either may get a stream.
  static void accept(const iroh::Connection& connection, const std::shared_ptr<Receiver>& receiver,
                     const std::shared_ptr<Reads>& reads, std::size_t index) {
    connection.accept_uni().then([connection, receiver, reads, index](Result<iroh::RecvStream> stream) {
      if (!stream.ok()) return;
      bool read = false;
      {
        const std::lock_guard lock(reads->mutex);
        read = reads->flags.at(index);
        if (!read) reads->ignored.push_back(std::move(stream.value()));
      }
      if (read) receiver->read(std::move(stream.value()));
      accept(connection, receiver, reads, index + 1);
    });
  }

  ConnectedPair& pair_;
  std::shared_ptr<Receiver> receiver_;
  std::shared_ptr<Reads> reads_ = std::make_shared<Reads>();
};

// Sends frames of these sizes, each filled with its number; counts how often each was given back.
struct Sender {
  std::shared_ptr<SendFlow> flow = std::make_shared<SendFlow>();
  std::mutex mutex;
  std::vector<int> done;
  int errors = 0;

  void send(std::size_t size) {
    std::uint32_t number = 0;
    {
      const std::lock_guard lock(mutex);
      number = static_cast<std::uint32_t>(done.size());
      done.push_back(0);
    }
    auto bytes = std::make_shared<Bytes>(size, static_cast<std::byte>(number));
    flow->send({header_of(number, size), *bytes, [this, number, bytes](const Result<Nothing>& result) {
                  // From now on the bytes are the caller's again, and may be anything.
                  std::fill(bytes->begin(), bytes->end(), std::byte{0xee});
                  const std::lock_guard lock(mutex);
                  ++done[number];
                  errors += result.ok() ? 0 : 1;
                }});
  }
  bool all_done() {
    const std::lock_guard lock(mutex);
    return std::all_of(done.begin(), done.end(), [](int times) { return times == 1; });
  }
};

void expect_exact(Receiver& receiver, std::size_t count) {
  CHECK(eventually([&] { return receiver.count() >= count; }));
  const std::lock_guard lock(receiver.mutex);
  INFO("next " << receiver.flow.next() << ", duplicates " << receiver.duplicates << ", "
               << (receiver.failed ? receiver.failed->what() : "no fault"));
  REQUIRE(receiver.delivered.size() == count);
  for (std::size_t i = 0; i < count; ++i) {
    if (receiver.delivered[i] != i) FAIL("frame " << receiver.delivered[i] << " in place " << i);
  }
  CHECK(receiver.spoiled == 0);
  CHECK_FALSE(receiver.failed);
}

}  // namespace

TEST_CASE("flow: frames wait for a stream, are given back once written, and leave with their acknowledgement") {
  if (!have_library()) return;
  ConnectedPair pair;
  const auto receiver = std::make_shared<Receiver>();
  Streams streams(pair, receiver);
  Sender sender;
  for (const std::size_t size : {0, 1, 500, 20'000, 300'000}) sender.send(size);
  CHECK(sender.flow->queued_bytes() == 320'501);
  CHECK_FALSE(sender.flow->all_acked());
  sender.flow->use(streams.open(true));
  expect_exact(*receiver, 5);
  CHECK(eventually([&] { return sender.all_done(); }));
  CHECK(sender.flow->queued_bytes() == 0);
  CHECK_FALSE(sender.flow->all_acked());
  CHECK(sender.flow->unacked_bytes() == 320'501);
  sender.flow->on_ack(3);
  CHECK(sender.flow->unacked_bytes() == 320'500);
  CHECK_FALSE(sender.flow->all_acked());
  sender.flow->on_ack(2);  // an old one says nothing
  sender.flow->on_ack(6);
  CHECK(sender.flow->all_acked());
  CHECK(sender.flow->unacked_bytes() == 0);
  try {
    sender.flow->on_ack(7);
    FAIL_CHECK("an acknowledgement of what was never sent was believed");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::protocol);
  }
}

TEST_CASE("flow: moved to another stream at any moment, every frame arrives once and in order") {
  if (!have_library()) return;
  std::mt19937 random(7);
  for (int round = 0; round < (kSanitized ? 3 : 12); ++round) {
    ConnectedPair pair;
    const auto receiver = std::make_shared<Receiver>();
    Streams streams(pair, receiver);
    Sender sender;
    constexpr std::size_t kFrames = 120;
    std::thread sending([&] {
      for (std::size_t i = 0; i < kFrames; ++i) sender.send(i % 7 == 0 ? 150'000 : i * 13 % 4000);
    });
    for (int move = 0; move < 8; ++move) {
      // At times a stream that nobody reads: it takes what fits, and is then given up with a write in flight.
      sender.flow->use(streams.open(random() % 3 != 0));
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
      if (random() % 2 == 0) sender.flow->on_ack(receiver->flow.next());
    }
    sending.join();
    sender.flow->use(nullptr);
    sender.flow->use(streams.open(true));
    expect_exact(*receiver, kFrames);
    sender.flow->on_ack(receiver->flow.next());
    CHECK(eventually([&] { return sender.all_done(); }));
    CHECK(sender.flow->all_acked());
    CHECK(sender.errors == 0);
  }
}

TEST_CASE("flow: failed, it gives everything back with the reason, once") {
  if (!have_library()) return;
  for (const bool has_stream : {true, false}) {
    ConnectedPair pair;
    Sender sender;
    if (has_stream) sender.flow->use(std::make_shared<SendLane>(pair.dialed.open_uni().get(soon())));
    for (int i = 0; i < 20; ++i) sender.send(1 << 20);
    sender.flow->fail(Error(ErrorKind::aborted, "enough"));
    sender.send(10);
    CHECK(eventually([&] { return sender.all_done(); }));
    CHECK(sender.errors >= 1);
    CHECK(sender.flow->all_acked());
  }
}

TEST_CASE("receive flow: duplicates are dropped, a gap is a fault, and a second stream waits for its turn") {
  ReceiveFlow flow;
  Payload none;
  FrameHeader header{.type = FrameType::data};
  header.number = 1;
  CHECK(flow.offer(header, none) == ReceiveFlow::Offer::deliver);
  CHECK(flow.offer(header, none) == ReceiveFlow::Offer::duplicate);
  header.number = 2;  // on another stream, while the first frame is being delivered
  CHECK(flow.offer(header, none) == ReceiveFlow::Offer::waits);
  CHECK(flow.next() == 3);
  const auto waited = flow.take();
  REQUIRE(waited);
  CHECK(waited->first.number == 2);
  CHECK_FALSE(flow.take());
  header.number = 4;
  try {
    flow.offer(header, none);
    FAIL_CHECK("a gap was accepted");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::protocol);
  }
  header.number = 3;
  CHECK(flow.offer(header, none) == ReceiveFlow::Offer::deliver);
}
