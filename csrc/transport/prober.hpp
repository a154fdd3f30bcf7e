// One host's end of the probes: asks other hosts for an answer, sends to one and listens to another, and says what it
// found. Knows ranks and a transport of its own; who asks whom is probe.cpp.
//
//   ping, pong   u8 kind, u64 number        a ping without a pong is repeated
//   got          u8 kind, u64 bytes         of the flow, so far; its sender may be so far ahead of that and no farther
//   end          u8 kind, u64 bytes         of the flow, in all
//   the flow     data frames of kFlowChunk
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "transport/iroh_transport.hpp"
#include "transport/sites.hpp"

namespace torch_iroh::transport {

class Prober final : public Receiver {
 public:
  // Takes part in `transport`, which nobody else uses, until destroyed.
  explicit Prober(std::shared_ptr<IrohTransport> transport);
  ~Prober() override;

  struct Answer {
    int rank = 0;
    std::uint32_t rtt_us = 0;
    bool relayed = false;
  };
  // The least round-trip time to each rank. Throws Error(timeout) naming those that did not answer, Error(peer_gone).
  std::vector<Answer> ask(const std::vector<int>& ranks, TimePoint by);

  // Sends to `next` for a bounded time and volume while `previous` does the same to this rank: the best rate at which
  // that came, in bytes per second. Throws likewise.
  std::uint64_t exchange_flow(int next, int previous, TimePoint by);

  void on_data(int from, const Tag& tag, Payload payload) override;
  void on_control(int from, Payload payload) override;
  void on_lost(int rank, bool left, const Error& cause) override;

 private:
  struct Peer {
    std::map<std::uint64_t, TimePoint> pings;  // without a pong
    int pongs = 0;
    std::optional<Duration> least;
    TimePoint first_pong = kNever;
    TimePoint ask_again{};
    bool settled(TimePoint now) const;
  };

  void tell(int rank, std::uint8_t kind, std::uint64_t number);
  void check_failed() const;  // with the lock held

  const std::shared_ptr<IrohTransport> transport_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int, Peer> peers_;  // that are asked
  std::uint64_t next_ping_ = 0;
  std::map<int, std::vector<Arrival>> arrivals_;
  std::map<int, std::uint64_t> received_, totals_;  // bytes of the flow from there, so far and in all
  std::map<int, std::uint64_t> acknowledged_;       // of the flow to there
  std::optional<Error> failed_;
};

}  // namespace torch_iroh::transport
