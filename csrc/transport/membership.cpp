#include "transport/membership.hpp"

#include <unistd.h>

#include <algorithm>
#include <map>

#include "base/bytes.hpp"
#include "base/log.hpp"
#include "base/random.hpp"
#include "base/rank_text.hpp"

namespace torch_iroh::transport {
namespace {

constexpr std::uint32_t kRecordMagic = 0x35524954;  // "TIR5"
constexpr std::uint16_t kMostAddresses = 64;
constexpr std::uint32_t kLeastChunk = 64;
constexpr std::size_t kMostPlanBytes = 2000;

// A store may still hold what an earlier group of the same name left there: each rank counts its own groups, so the
// n-th group of every rank meets under the same prefix.
std::string prefix_of_turn(KeyValueStore& store, int rank) {
  return "torch_iroh/" + std::to_string(store.add_one("torch_iroh/turn/" + std::to_string(rank))) + "/";
}

std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof name - 1) == 0 ? name : "?";
}

void await(KeyValueStore& store, const JoinRequest& request, const std::vector<int>& ranks,
           const std::vector<std::string>& keys, TimePoint deadline) {
  const Duration left = std::max<Duration>(deadline - Clock::now(), milliseconds(1));
  if (store.wait(keys, left)) return;
  std::vector<int> missing;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (!store.has(keys[i])) missing.push_back(ranks[i]);
  }
  if (missing.empty()) return;
  throw Error(ErrorKind::timeout,
              "rank " + std::to_string(request.rank) + ": making the group: " + ranks_text(missing) + " of " +
                  std::to_string(request.world) + " did not join within " + to_text(request.timeout) +
                  ". Try: look at the log of that rank, or raise the timeout of the group");
}

void check_agreement(const JoinRequest& request, int peer, const Record& mine, const Record& theirs) {
  const std::string who = "rank " + std::to_string(peer) + " on " + theirs.host;
  if (theirs.wire_min > mine.wire_max || theirs.wire_max < mine.wire_min) {
    throw Error(ErrorKind::mismatch,
                "rank " + std::to_string(request.rank) + " speaks wire versions " + std::to_string(mine.wire_min) +
                    "-" + std::to_string(mine.wire_max) + ", " + who + " speaks " + std::to_string(theirs.wire_min) +
                    "-" + std::to_string(theirs.wire_max) + ". Try: install the same torch-iroh everywhere");
  }
  if (theirs.members != mine.members) {
    throw Error(ErrorKind::mismatch, "the ranks disagree about who is in this group: rank " +
                                         std::to_string(request.rank) + " listed [" + mine.members + "], " + who +
                                         " listed [" + theirs.members + "]");
  }
  if (theirs.plan != mine.plan) {
    const auto text = [](const std::string& plan) { return plan.empty() ? "auto" : "'" + plan + "'"; };
    throw Error(ErrorKind::mismatch, "the ranks disagree about the plan: that of rank " + std::to_string(request.rank) +
                                         " is " + text(mine.plan) + ", that of " + who + " is " + text(theirs.plan) +
                                         ". Try: the same plan or algorithm option, and the same TORCH_IROH_PLAN and "
                                         "TORCH_IROH_ALGORITHM, on all ranks");
  }
  if (theirs.compression != mine.compression) {
    throw Error(ErrorKind::mismatch, "the ranks disagree about compression: rank " + std::to_string(request.rank) +
                                         " has '" + mine.compression + "', " + who + " has '" + theirs.compression +
                                         "'. Try: the same compression option or TORCH_IROH_COMPRESSION on all ranks");
  }
}

using Groups = std::vector<std::vector<std::int32_t>>;

Groups grouped_by(const std::vector<std::string>& names) {
  Groups groups;
  std::map<std::string, std::size_t> known;
  for (std::size_t rank = 0; rank < names.size(); ++rank) {
    const auto [entry, is_new] = known.emplace(names[rank], groups.size());
    if (is_new) groups.emplace_back();
    groups[entry->second].push_back(static_cast<std::int32_t>(rank));
  }
  return groups;
}

// A rank whose host is not known is a host of its own; a host that names no site, a site of its own.
std::vector<Groups> levels_of(const std::vector<Record>& records) {
  std::vector<std::string> hosts;
  std::vector<std::string> sites;
  std::map<std::string, std::size_t> speakers;
  for (std::size_t rank = 0; rank < records.size(); ++rank) {
    const Record& record = records[rank];
    hosts.push_back(record.sharing.host.empty() ? "rank " + std::to_string(rank) : record.sharing.host);
    sites.push_back(record.site.empty() ? "host " + hosts.back() : "site " + record.site);
    const std::size_t speaker = speakers.emplace(hosts.back(), rank).first->second;
    if (records[speaker].site == record.site) continue;
    throw Error(ErrorKind::mismatch, "ranks " + std::to_string(speaker) + " and " + std::to_string(rank) +
                                         " are on one host (" + record.host + ") and name two sites, '" +
                                         records[speaker].site + "' and '" + record.site +
                                         "'. Try: the same TORCH_IROH_SITE for all ranks of a host");
  }
  return {grouped_by(hosts), grouped_by(sites)};
}

// A rank's memory for the others of its host; null, and why is said once, where there can be none.
std::unique_ptr<HostTeam> make_team(const JoinRequest& request) {
  if (request.sharing == Sharing::none || request.world == 1 || host_identity().empty()) return nullptr;
  try {
    return std::make_unique<HostTeam>(request.rank, request.world);
  } catch (const Error& error) {
    log_once(LogLevel::warn, "shared memory", "ranks of this host share no memory: " + std::string(error.what()));
    return nullptr;
  }
}

// Every rank tries for itself; the ranks of a host do what all of them can.
std::shared_ptr<HostTeam> settle_team(KeyValueStore& store, const JoinRequest& request, const std::string& prefix,
                                      const std::vector<Record>& records, std::unique_ptr<HostTeam> team,
                                      TimePoint deadline) {
  if (!team) return nullptr;
  const auto key = [&](int rank) { return prefix + "shares/" + std::to_string(rank); };
  const std::string& host = records[static_cast<std::size_t>(request.rank)].sharing.host;
  std::vector<int> ranks;
  std::vector<std::string> keys;
  for (int rank = 0; rank < request.world; ++rank) {
    const HostIntroduction& theirs = records[static_cast<std::size_t>(rank)].sharing;
    if (theirs.host != host) continue;
    if (theirs.memory < 0) return nullptr;
    ranks.push_back(rank);
    keys.push_back(key(rank));
  }
  if (ranks.size() == 1) return nullptr;
  Sharing mine = Sharing::none;
  try {
    std::vector<HostIntroduction> introductions;
    for (const Record& record : records) introductions.push_back(record.sharing);
    team->attach(introductions);
    mine = team->can_read() ? request.sharing : Sharing::windows;
  } catch (const Error& error) {
    log_once(LogLevel::warn, "shared memory", "ranks of this host share no memory: " + std::string(error.what()));
  }
  store.set(key(request.rank), {static_cast<std::uint8_t>(mine)});
  await(store, request, ranks, keys, deadline);
  for (const std::string& one : keys) {
    const auto theirs = store.get(one);
    if (theirs.size() != 1) throw Error(ErrorKind::protocol, "the store's entry " + one + " is unreadable");
    mine = std::min(mine, static_cast<Sharing>(theirs.front()));
  }
  if (mine == Sharing::none) return nullptr;
  team->settle(mine == Sharing::direct);
  return team;
}

}  // namespace

std::vector<std::uint8_t> encode(const Record& record) {
  ByteWriter out;
  out.put(kRecordMagic).put(record.wire_min).put(record.wire_max).put(record.chunk_bytes);
  out.put_text(record.members).put_text(record.host).put_bytes(record.addr.id);
  out.put_text(record.addr.relay_url.value_or(""));
  out.put(static_cast<std::uint16_t>(record.addr.direct.size()));
  for (const std::string& address : record.addr.direct) out.put_text(address);
  const HostIntroduction& sharing = record.sharing;
  out.put_text(record.site).put_text(sharing.host).put(sharing.pid).put(sharing.memory).put(sharing.nonce);
  out.put(sharing.bell).put(sharing.bell_nonce).put_text(record.plan).put_text(record.compression);
  out.put(static_cast<std::uint8_t>(record.probe)).put(static_cast<std::uint8_t>(record.standby.has_value()));
  if (record.standby) out.put_bytes(record.standby->id).put_text(record.standby->relay_url.value_or(""));
  return out.octets();
}

Record decode_record(const std::vector<std::uint8_t>& bytes) {
  ByteReader in(std::as_bytes(std::span(bytes)));
  if (in.get<std::uint32_t>() != kRecordMagic) throw Error(ErrorKind::protocol, "not a torch-iroh record");
  Record record;
  record.wire_min = in.get<std::uint8_t>();
  record.wire_max = in.get<std::uint8_t>();
  record.chunk_bytes = in.get<std::uint32_t>();
  record.members = printable(in.get_text());
  record.host = printable(in.get_text());
  const auto id = in.get_bytes(record.addr.id.size());
  std::copy(id.begin(), id.end(), record.addr.id.begin());
  if (std::string relay = in.get_text(); !relay.empty()) record.addr.relay_url = std::move(relay);
  const auto addresses = in.get<std::uint16_t>();
  if (addresses > kMostAddresses) throw Error(ErrorKind::protocol, "a record with too many addresses");
  for (int i = 0; i < addresses; ++i) {
    record.addr.direct.push_back(in.get_text());
    if (!iroh::is_socket_address(record.addr.direct.back())) {
      throw Error(ErrorKind::protocol, "'" + printable(record.addr.direct.back()) + "' is not an address");
    }
  }
  HostIntroduction& sharing = record.sharing;
  record.site = printable(in.get_text());
  sharing.host = printable(in.get_text());
  sharing.pid = in.get<std::int32_t>();
  sharing.memory = in.get<std::int32_t>();
  sharing.nonce = in.get<std::uint64_t>();
  sharing.bell = in.get<std::int32_t>();
  sharing.bell_nonce = in.get<std::uint64_t>();
  record.plan = printable(in.get_text());
  if (record.plan.size() > kMostPlanBytes) throw Error(ErrorKind::protocol, "a record with a too long plan");
  record.compression = printable(in.get_text());
  if (record.compression.size() > kMostPlanBytes) throw Error(ErrorKind::protocol, "a record with a too long codec");
  const auto probe = in.get<std::uint8_t>();
  if (probe > 1) throw Error(ErrorKind::protocol, "a record with an unknown wish");
  record.probe = probe == 1;
  const auto standby = in.get<std::uint8_t>();
  if (standby > 1) throw Error(ErrorKind::protocol, "a record with an unknown endpoint");
  if (standby == 1) {
    const auto second = in.get_bytes(record.addr.id.size());
    record.standby.emplace();
    std::copy(second.begin(), second.end(), record.standby->id.begin());
    record.standby->relay_url = in.get_text();
  }
  if (in.left() != 0) throw Error(ErrorKind::protocol, "a record with bytes behind its end");
  if (record.chunk_bytes < kLeastChunk || record.chunk_bytes > link::kMaxFrameBytes || record.chunk_bytes % 64 != 0) {
    throw Error(ErrorKind::protocol, "a record with chunks of " + std::to_string(record.chunk_bytes) + " bytes");
  }
  return record;
}

Joined join_group(KeyValueStore& store, const std::shared_ptr<link::Node>& node, const JoinRequest& request) {
  const TimePoint deadline = after(Clock::now(), request.timeout);
  const std::string prefix = prefix_of_turn(store, request.rank);
  const std::string group_key = prefix + "group";
  const auto rank_key = [&](int rank) { return prefix + "rank/" + std::to_string(rank); };
  // Rank 0 numbers the group before anyone can send to anyone: who is known to others has joined already.
  if (request.rank == 0) {
    ByteWriter number;
    number.put(random_number());
    store.set(group_key, number.octets());
  } else {
    await(store, request, {0}, {group_key}, deadline);
  }
  const auto number_bytes = store.get(group_key);
  const auto number = ByteReader(std::as_bytes(std::span(number_bytes))).get<std::uint64_t>();

  Joined joined;
  joined.transport = IrohTransport::join(node, number, request.rank, request.world);

  Record mine;
  mine.chunk_bytes = request.chunk_bytes;
  mine.members = request.members;
  mine.host = host_name();
  const link::PeerAddr addr = node->addr();
  mine.addr = addr.main;
  mine.standby = addr.standby;
  if (mine.addr.direct.size() > kMostAddresses) mine.addr.direct.resize(kMostAddresses);
  auto team = make_team(request);
  mine.sharing = team ? team->introduction() : HostIntroduction{host_identity()};
  mine.site = request.site;
  mine.plan = request.plan;
  mine.compression = request.compression;
  mine.probe = request.probe;
  store.set(rank_key(request.rank), encode(mine));

  std::vector<int> ranks;
  std::vector<std::string> keys;
  for (int rank = 0; rank < request.world; ++rank) {
    ranks.push_back(rank);
    keys.push_back(rank_key(rank));
  }
  await(store, request, ranks, keys, deadline);

  joined.chunk_bytes = request.chunk_bytes;
  std::uint8_t wire_version = mine.wire_max;
  std::vector<link::PeerAddr> members;
  std::vector<Record> records;
  for (int rank = 0; rank < request.world; ++rank) {
    try {
      Record record = decode_record(store.get(keys[static_cast<std::size_t>(rank)]));
      check_agreement(request, rank, mine, record);
      wire_version = std::min(wire_version, record.wire_max);
      joined.chunk_bytes = std::min(joined.chunk_bytes, record.chunk_bytes);
      for (std::size_t other = 0; other < members.size(); ++other) {
        if (members[other].main.id == record.addr.id) {
          throw Error(ErrorKind::protocol, "it has the endpoint id of rank " + std::to_string(other));
        }
      }
      members.push_back({record.addr, record.standby});
      records.push_back(std::move(record));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::protocol) throw;
      throw Error(ErrorKind::protocol, "rank " + std::to_string(request.rank) + ": the store's entry of rank " +
                                           std::to_string(rank) + " is unreadable: " + error.what());
    }
  }
  joined.transport->set_members(members, wire_version);
  joined.levels = levels_of(records);
  joined.hosts_share = std::all_of(joined.levels.front().begin(), joined.levels.front().end(), [&](const auto& ranks) {
    return ranks.size() == 1 || std::all_of(ranks.begin(), ranks.end(), [&](std::int32_t rank) {
             return records[static_cast<std::size_t>(rank)].sharing.memory >= 0;
           });
  });
  joined.names_sites =
      std::any_of(records.begin(), records.end(), [](const Record& record) { return !record.site.empty(); });
  joined.probe = joined.levels.front().size() > 1 &&
                 std::all_of(records.begin(), records.end(), [](const Record& record) { return record.probe; });
  joined.meeting = {prefix, number, std::move(members), wire_version, {}, {}};
  for (const Record& record : records) {
    joined.meeting.hosts.push_back(record.sharing.host);
    joined.meeting.hints.push_back(record.site);
  }
  joined.team = settle_team(store, request, prefix, records, std::move(team), deadline);
  return joined;
}

}  // namespace torch_iroh::transport
