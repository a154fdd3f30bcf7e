#include "transport/host_watch.hpp"

#include <utility>

namespace torch_iroh::transport {

namespace {

std::string process_of(const HostTeam& team, int rank) {
  return "its process (" + std::to_string(team.pid_of(rank)) + ")";
}

}  // namespace

std::string HostWatch::ended_text(const HostTeam& team, int rank) {
  return process_of(team, rank) + " ended";
}

std::optional<HostWatch::Gone> HostWatch::look(const HostTeam& team, const std::vector<int>& ranks, TimePoint now) {
  // A look that comes late means that this process stood still itself: then nobody's time counts.
  if (now - looked_at_ > 10 * kInterval) stopped_since_.clear();
  looked_at_ = now;
  std::map<int, TimePoint> stopped;
  for (const int rank : ranks) {
    if (team.ended(rank)) return Gone{rank, ended_text(team, rank)};
    if (!team.stopped(rank)) continue;
    const auto known = stopped_since_.find(rank);
    const TimePoint since = known == stopped_since_.end() ? now : known->second;
    stopped.emplace(rank, since);
    if (now - since < peer_timeout_) continue;
    return Gone{
        rank, process_of(team, rank) + " has been stopped for " + to_text(now - since) + " (a signal, or a debugger)"};
  }
  stopped_since_ = std::move(stopped);
  return std::nullopt;
}

}  // namespace torch_iroh::transport
