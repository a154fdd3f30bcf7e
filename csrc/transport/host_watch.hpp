// Whether the processes of a host's other ranks still run. Nobody says so when a process is killed or stopped: one
// looks.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/time.hpp"
#include "transport/host_team.hpp"

namespace torch_iroh::transport {

class HostWatch {
 public:
  // How often to look, while somebody is waited for.
  static constexpr Duration kInterval = milliseconds(100);

  // `peer_timeout`: how long a process may stand still before its rank is given up.
  explicit HostWatch(Duration peer_timeout) : peer_timeout_(peer_timeout) {}

  struct Gone {
    int rank = -1;
    std::string why;
  };
  static std::string ended_text(const HostTeam& team, int rank);

  // The first of `ranks` that will not go on. One thread at a time.
  std::optional<Gone> look(const HostTeam& team, const std::vector<int>& ranks, TimePoint now);

 private:
  const Duration peer_timeout_;
  std::map<int, TimePoint> stopped_since_;  // ranks that were seen standing still
  TimePoint looked_at_{};
};

}  // namespace torch_iroh::transport
