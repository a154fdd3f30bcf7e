// How the ranks of a group find each other: each publishes who it is in a key-value store, reads the others, and all
// agree on a group number, a wire version and a chunk size. Knows the store only as five functions.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "link/node.hpp"
#include "transport/host_team.hpp"
#include "transport/iroh_transport.hpp"

namespace torch_iroh::transport {

class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;
  virtual void set(const std::string& key, const std::vector<std::uint8_t>& value) = 0;
  virtual std::vector<std::uint8_t> get(const std::string& key) = 0;  // of a key that is there
  virtual bool has(const std::string& key) = 0;
  virtual std::int64_t add_one(const std::string& key) = 0;  // the new value
  // False when a key is still missing after `timeout`. Throws when the store itself fails.
  virtual bool wait(const std::vector<std::string>& keys, Duration timeout) = 0;
};

// What one rank publishes.
struct Record {
  std::uint8_t wire_min = link::kWireVersionMin;
  std::uint8_t wire_max = link::kWireVersionMax;
  std::uint32_t chunk_bytes = 0;
  std::string members;  // which ranks this rank believes are in the group
  std::string host;     // for error texts
  std::string site{};   // ranks that name the same site have a fast network between them; empty: not said
  HostIntroduction sharing{};
  std::string plan{};                // what the user fixed of how collectives run; equal on all ranks
  std::string compression = "none";  // between sites; equal on all ranks
  bool probe = false;                // wants the links measured
  iroh::EndpointAddr addr;
  std::optional<iroh::EndpointAddr> standby{};  // knows only relays (link/link.hpp)
};

std::vector<std::uint8_t> encode(const Record& record);
Record decode_record(const std::vector<std::uint8_t>& bytes);  // throws Error(protocol)

enum class Sharing : std::uint8_t {
  none,
  windows,  // copies through shared memory
  direct,   // reads other ranks' buffers where they are, if the kernel permits it; else windows
};

struct JoinRequest {
  int rank = 0;
  int world = 1;
  std::uint32_t chunk_bytes = 0;
  std::string members;
  Duration timeout{};
  std::string site{};                // equal on all ranks of a host
  std::string plan{};                // equal on all ranks
  std::string compression = "none";  // equal on all ranks
  bool probe = false;                // with the other ranks if all want it
  Sharing sharing = Sharing::none;   // at most, with the other ranks of this host if all of them want it too
};

// What it takes for members to meet again (probe.hpp).
struct Meeting {
  std::string prefix;  // of the group's keys in the store
  std::uint64_t group = 0;
  std::vector<link::PeerAddr> members;
  std::uint8_t wire_version = 0;
  std::vector<std::string> hosts;  // by rank: host_identity(); empty: not known
  std::vector<std::string> hints;  // by rank: the site that it names
};

struct Joined {
  std::shared_ptr<IrohTransport> transport;
  std::uint32_t chunk_bytes = 0;  // the smallest that any rank asked for
  // Ranks by host and by site (levels[0], levels[1]), both in the order of their first ranks.
  std::vector<std::vector<std::vector<std::int32_t>>> levels;
  bool probe = false;  // several hosts, and all ranks want their links measured
  Meeting meeting;
  bool names_sites = false;        // some rank does
  bool hosts_share = false;        // all ranks that are not alone on their host offered memory
  std::shared_ptr<HostTeam> team;  // the ranks of this host, when they share memory, as all of them know
};

// Blocks until every rank has published. Throws Error(timeout) naming the ranks that have not, Error(mismatch) when
// ranks disagree about who is in the group or speak no common wire version.
Joined join_group(KeyValueStore& store, const std::shared_ptr<link::Node>& node, const JoinRequest& request);

}  // namespace torch_iroh::transport
