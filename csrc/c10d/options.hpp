// What a user can set for a group of backend "iroh", and how it reaches the core. Unset fields take the environment
// variable of the same name (TORCH_IROH_...), then the default.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "codec/codec.hpp"
#include "collective/pins.hpp"
#include "link/node.hpp"
#include "transport/membership.hpp"

namespace torch_iroh::c10d_backend {

struct IrohOptions final : ::c10d::Backend::Options {
  using Seconds = std::optional<double>;

  IrohOptions() : ::c10d::Backend::Options("iroh") {}

  // Of this group.
  std::optional<std::int64_t> chunk_bytes;   // default 256 KiB; the smallest of all ranks counts
  std::optional<std::string> algorithm;      // "auto" (default) or a name of collective::Algorithm
  std::optional<std::string> plan;           // pins by collective and size (collective/pins.hpp), or algorithm
  std::optional<std::string> connect;        // "lazy" (default): on first use; "eager": all peers at once
  std::optional<std::string> shared_memory;  // "auto" (default): between ranks of one host; "single_copy", "off"
  std::optional<std::string> probe;          // "auto" (default): several hosts measure their links; "off"
  std::optional<std::string> site;           // ranks that name the same site have a fast network between them
  std::optional<std::string> compression;    // between sites: a codec (codec/codec.hpp), default "none"
  std::optional<std::string> inner;          // backend inside hosts: "auto" (default), "nccl", "gloo", "none"
  // Of this process: the first group decides.
  std::optional<std::int64_t> streams;  // data streams per peer at most, default 16
  Seconds peer_timeout;                 // silence after which a peer is dead, default 3
  Seconds heartbeat;                    // default 0.5
  Seconds connect_timeout;              // default 10
  std::optional<std::string> bind;      // "ip:port", default: every interface, any port
  std::optional<std::string> relay;     // URLs, "n0", or "none" (default)
  std::optional<std::string> relay_token;
  std::optional<std::string> observer;  // endpoints that tell this process its public address; default: none

  // What holds in the end. Throw Error(invalid) naming the option and what is allowed.
  std::uint32_t resolved_chunk_bytes() const;
  collective::Pins resolved_pins() const;  // of plan or algorithm
  bool resolved_eager() const;
  std::string resolved_site() const;
  std::string resolved_inner() const;
  codec::Codec resolved_compression() const;
  bool resolved_probe() const;
  transport::Sharing resolved_shared_memory() const;
  // Values that nobody set are those of the node that already runs, if one does.
  link::NodeOptions resolved_node_options() const;
};

}  // namespace torch_iroh::c10d_backend
