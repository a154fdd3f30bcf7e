// "Has everyone come this far?": rank 0 hears from every other rank, then lets all go on, or says who is missing.
// Unlike a collective, one that fails does not break its group, so it can be asked again. Lives on its group's strand.
//
//   rank r -> 0   arrive #n            rank 0 -> r   verdict #n, with the reason if it is bad
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/time.hpp"
#include "collective/messages.hpp"

namespace torch_iroh::collective {

struct MonitoredBarrierCall {
  Duration timeout{};
  bool name_all = false;  // rank 0 names every rank that is missing, not only the first
  std::function<void(const Error*)> done;
};

class MonitoredBarrier {
 public:
  using Tell = std::function<void(int peer, const Message& message)>;

  MonitoredBarrier(int rank, int world, Tell tell);

  void begin(MonitoredBarrierCall call);
  void on_arrive(int from, const Message& arrive);    // rank 0
  void on_verdict(int from, const Message& verdict);  // the others
  // Ends what waits for a rank that will not come.
  void on_lost(int rank, const Error& gone);

  // Everything in flight ends with `cause`.
  void fail(const Error& cause);
  TimePoint next_deadline() const;
  void expire(TimePoint now);

 private:
  struct Waiting {
    MonitoredBarrierCall call;
    TimePoint deadline;
  };
  std::vector<int> missing(std::uint64_t number) const;
  void release();
  void give_up(std::uint64_t number, const Waiting& waiting, const std::string& why);

  const int rank_;
  const Tell tell_;
  std::uint64_t next_ = 0;
  std::map<std::uint64_t, Waiting> waiting_;
  std::vector<std::uint64_t> arrived_;  // rank 0: by rank, the barriers that it has reached are below this number
};

}  // namespace torch_iroh::collective
