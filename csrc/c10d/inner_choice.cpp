#include "c10d/inner_choice.hpp"

#include <map>
#include <utility>

#include "base/bytes.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "base/rank_text.hpp"

namespace torch_iroh::c10d_backend {
namespace {

constexpr std::size_t kMostNameBytes = 200;

InnerMaker& maker() {
  static InnerMaker held;
  return held;
}

struct Wish {  // what one rank publishes
  std::string asked;
  InnerFacts facts;
};

std::vector<std::uint8_t> encode(const Wish& wish) {
  ByteWriter out;
  out.put_text(wish.asked).put_text(wish.facts.device).put(static_cast<std::uint8_t>(wish.facts.has_nccl ? 1 : 0));
  const auto* from = reinterpret_cast<const std::uint8_t*>(out.bytes().data());
  return {from, from + out.bytes().size()};
}

Wish decode(const std::vector<std::uint8_t>& bytes) {
  ByteReader in(std::as_bytes(std::span(bytes)));
  Wish wish;
  wish.asked = printable(in.get_text());
  wish.facts.device = printable(in.get_text());
  wish.facts.has_nccl = in.get<std::uint8_t>() != 0;
  if (in.left() != 0 || wish.asked.size() > kMostNameBytes || wish.facts.device.size() > kMostNameBytes) {
    throw Error(ErrorKind::protocol, "not what a rank says about its inner backend");
  }
  return wish;
}

// What every rank wishes, by rank.
std::vector<Wish> exchange(transport::KeyValueStore& keys, const InnerRequest& request, const Wish& mine,
                           std::string& prefix) {
  prefix = request.prefix + "inner/";
  std::vector<std::string> names;
  for (int rank = 0; rank < request.world; ++rank) names.push_back(prefix + std::to_string(rank));
  keys.set(names[static_cast<std::size_t>(request.rank)], encode(mine));
  if (!keys.wait(names, request.timeout)) {
    std::vector<int> missing;
    for (int rank = 0; rank < request.world; ++rank) {
      if (!keys.has(names[static_cast<std::size_t>(rank)])) missing.push_back(rank);
    }
    if (!missing.empty()) {
      throw Error(ErrorKind::timeout, "rank " + std::to_string(request.rank) + ": making the group: " +
                                          ranks_text(missing) + " did not say within " + to_text(request.timeout) +
                                          " which inner backend to use. Try: look at the log of that rank");
    }
  }
  std::vector<Wish> wishes;
  for (int rank = 0; rank < request.world; ++rank) {
    try {
      wishes.push_back(decode(keys.get(names[static_cast<std::size_t>(rank)])));
    } catch (const Error& error) {
      throw Error(error.kind(), "rank " + std::to_string(request.rank) + ": the store's entry of rank " +
                                    std::to_string(rank) + " is unreadable: " + error.what());
    }
  }
  return wishes;
}

void check_agreement(const std::vector<Wish>& wishes) {
  for (std::size_t rank = 1; rank < wishes.size(); ++rank) {
    if (wishes[rank].asked == wishes.front().asked) continue;
    throw Error(ErrorKind::mismatch, "the ranks disagree about the backend inside hosts: rank 0 has inner='" +
                                         wishes.front().asked + "', rank " + std::to_string(rank) + " has inner='" +
                                         wishes[rank].asked + "'. Try: the same TORCH_IROH_INNER on all ranks");
  }
}

// Why NCCL cannot serve this group, in words about a rank; empty: it can. A device that is not known is an obstacle
// only where nobody asked for NCCL.
std::string obstacle_to_nccl(const std::vector<Wish>& wishes, const Hosts& hosts, bool asked) {
  for (std::size_t rank = 0; rank < wishes.size(); ++rank) {
    const InnerFacts& facts = wishes[rank].facts;
    if (!facts.has_nccl) return "rank " + std::to_string(rank) + "'s torch has no NCCL, or no CUDA device";
    if (facts.device.empty() && !asked) {
      return "rank " + std::to_string(rank) + " had chosen no CUDA device when the group was made";
    }
  }
  for (const Hosts::Ranks& host : hosts.all()) {
    std::map<std::string, std::int32_t> taken;
    for (const std::int32_t rank : host) {
      const std::string& device = wishes[static_cast<std::size_t>(rank)].facts.device;
      if (device.empty()) continue;
      const auto [first, is_new] = taken.emplace(device, rank);
      if (!is_new) {
        return "ranks " + std::to_string(first->second) + " and " + std::to_string(rank) +
               " of one host work on the same device " + device;
      }
    }
  }
  return "";
}

}  // namespace

void set_inner_maker(InnerMaker made) {
  maker() = std::move(made);
}

std::optional<InnerBackend> make_inner(const c10::intrusive_ptr<::c10d::Store>& store, transport::KeyValueStore& keys,
                                       const Hosts& hosts, const InnerRequest& request) {
  const bool by_name = request.asked == "nccl" || request.asked == "gloo";
  if (!hosts.worth_it()) {
    if (by_name) {
      log_once(LogLevel::info, "inner idle",
               "inner='" + request.asked + "' has nothing to do in a group of " +
                   (hosts.all().size() == 1 ? "one host" : "one rank on every host"));
    }
    return std::nullopt;
  }
  Wish mine{request.asked, {}};
  if (request.asked == "auto" || request.asked == "nccl") mine.facts = maker().facts();
  std::string prefix;
  const auto wishes = exchange(keys, request, mine, prefix);
  check_agreement(wishes);
  if (request.asked == "none") return std::nullopt;
  if (request.asked != "gloo") {
    const std::string obstacle = obstacle_to_nccl(wishes, hosts, by_name);
    if (!obstacle.empty() && by_name) {
      throw Error(ErrorKind::invalid,
                  "rank " + std::to_string(request.rank) + ": inner='nccl' cannot be had: " + obstacle +
                      ". Try: torch.cuda.set_device(LOCAL_RANK) before the group is made, or inner='auto'");
    }
    if (!obstacle.empty()) {
      log_once(LogLevel::info, "inner none", "device tensors go over iroh inside hosts too: " + obstacle);
      return std::nullopt;
    }
    log_once(LogLevel::info, "inner nccl", "device tensors of the ranks of one host go through NCCL");
  }
  const std::string name = request.asked == "gloo" ? "gloo" : "nccl";
  if (hosts.alone()) return InnerBackend{name, nullptr};
  try {
    return InnerBackend{
        name, maker().make(name, store, prefix + "host/" + std::to_string(hosts.host()),
                           static_cast<int>(hosts.index()), static_cast<int>(hosts.mine().size()), request.timeout)};
  } catch (const std::exception& error) {
    throw Error(ErrorKind::library, "rank " + std::to_string(request.rank) + ": " + name +
                                        " for the ranks of this host (" + numbers_text(hosts.mine()) +
                                        ") cannot be made: " + error.what());
  }
}

}  // namespace torch_iroh::c10d_backend
