// Which ranks of a group share a host, seen by one of them. Knows no tensor and no backend.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace torch_iroh::collective {

class Hosts {
 public:
  using Ranks = std::vector<std::int32_t>;
  using Members = std::shared_ptr<const Ranks>;

  Hosts(std::vector<Ranks> hosts, std::int32_t rank) : hosts_(std::move(hosts)) {
    for (std::size_t host = 0; host < hosts_.size(); ++host) {
      const auto place = std::find(hosts_[host].begin(), hosts_[host].end(), rank);
      if (place == hosts_[host].end()) continue;
      host_ = host;
      index_ = static_cast<std::size_t>(place - hosts_[host].begin());
    }
  }

  const std::vector<Ranks>& all() const { return hosts_; }
  const Ranks& mine() const { return hosts_[host_]; }
  std::size_t host() const { return host_; }    // of this rank
  std::size_t index() const { return index_; }  // of this rank among those of its host
  bool alone() const { return mine().size() == 1; }

  // Several hosts, and one of them with several ranks: there is something to do inside of hosts, and something between.
  bool worth_it() const {
    return hosts_.size() > 1 &&
           std::any_of(hosts_.begin(), hosts_.end(), [](const Ranks& host) { return host.size() > 1; });
  }
  bool even() const {  // each host has as many ranks
    return std::all_of(hosts_.begin(), hosts_.end(),
                       [this](const Ranks& host) { return host.size() == hosts_.front().size(); });
  }

  // One rank of each host. Where hosts are even: those with this rank's index.
  Members column() const {
    Ranks ranks;
    for (const Ranks& host : hosts_) ranks.push_back(host[index_]);
    return std::make_shared<const Ranks>(std::move(ranks));
  }
  // `root` and the first rank of each other host.
  Members leaders(std::int32_t root) const {
    Ranks ranks;
    for (const Ranks& host : hosts_) ranks.push_back(leader_of(host, root));
    return std::make_shared<const Ranks>(std::move(ranks));
  }
  // The index of this host's leader among its ranks.
  std::size_t leader(std::int32_t root) const {
    return static_cast<std::size_t>(std::find(mine().begin(), mine().end(), leader_of(mine(), root)) - mine().begin());
  }

 private:
  static std::int32_t leader_of(const Ranks& host, std::int32_t root) {
    return std::find(host.begin(), host.end(), root) == host.end() ? host.front() : root;
  }

  std::vector<Ranks> hosts_;
  std::size_t host_ = 0;
  std::size_t index_ = 0;
};

}  // namespace torch_iroh::collective
