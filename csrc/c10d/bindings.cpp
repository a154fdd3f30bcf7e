// The Python module torch_iroh._C: the process group, its options, its statistics. Imported only when a group is made.
#include <algorithm>
#include <set>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "c10d/group_maker.hpp"
#include "c10d/process_group.hpp"
#include "iroh/library.hpp"

namespace py = pybind11;

namespace torch_iroh::c10d_backend {
namespace {

using IrohOptionsPtr = c10::intrusive_ptr<IrohOptions>;

IrohOptionsPtr make_options(std::optional<std::chrono::milliseconds> timeout, std::optional<std::int64_t> chunk_bytes,
                            std::optional<std::string> algorithm, std::optional<std::string> plan,
                            std::optional<std::string> connect, std::optional<std::string> shared_memory,
                            std::optional<std::string> probe, std::optional<std::string> site,
                            std::optional<std::string> compression, std::optional<std::string> inner,
                            std::optional<std::int64_t> streams, IrohOptions::Seconds peer_timeout,
                            IrohOptions::Seconds heartbeat, IrohOptions::Seconds connect_timeout,
                            std::optional<std::string> bind, std::optional<std::string> relay,
                            std::optional<std::string> relay_token, std::optional<std::string> observer) {
  auto options = c10::make_intrusive<IrohOptions>();
  if (timeout) options->timeout = *timeout;
  options->chunk_bytes = chunk_bytes;
  options->algorithm = std::move(algorithm);
  options->plan = std::move(plan);
  options->connect = std::move(connect);
  options->shared_memory = std::move(shared_memory);
  options->probe = std::move(probe);
  options->site = std::move(site);
  options->compression = std::move(compression);
  options->inner = std::move(inner);
  options->streams = streams;
  options->peer_timeout = peer_timeout;
  options->heartbeat = heartbeat;
  options->connect_timeout = connect_timeout;
  options->bind = std::move(bind);
  options->relay = std::move(relay);
  options->relay_token = std::move(relay_token);
  options->observer = std::move(observer);
  // Wrong values are refused here, where the user's line is in the traceback.
  options->resolved_chunk_bytes();
  options->resolved_pins();
  options->resolved_eager();
  options->resolved_shared_memory();
  options->resolved_probe();
  options->resolved_site();
  options->resolved_inner();
  options->resolved_compression();
  options->resolved_node_options();
  return options;
}

template <typename T>
std::string shown(const char* name, const std::optional<T>& value) {
  if (!value) return "";
  return std::string(", ") + name + "=" + py::repr(py::cast(*value)).template cast<std::string>();
}

std::string repr(const IrohOptions& options) {
  std::string text =
      shown("chunk_bytes", options.chunk_bytes) + shown("algorithm", options.algorithm) + shown("plan", options.plan) +
      shown("connect", options.connect) + shown("shared_memory", options.shared_memory) +
      shown("probe", options.probe) + shown("site", options.site) + shown("compression", options.compression) +
      shown("inner", options.inner) + shown("streams", options.streams) + shown("peer_timeout", options.peer_timeout) +
      shown("heartbeat", options.heartbeat) + shown("connect_timeout", options.connect_timeout) +
      shown("bind", options.bind) + shown("relay", options.relay) + (options.relay_token ? ", relay_token=..." : "") +
      shown("observer", options.observer);
  return "torch_iroh.Options(" + (text.empty() ? text : text.substr(2)) + ")";
}

// As the fields of torch_iroh.Link.
py::dict to_dict(const transport::LinkCost& link) {
  py::dict fields;
  fields["latency"] = static_cast<double>(link.latency_ns) * 1e-9;
  fields["bandwidth"] = 1e12 / static_cast<double>(std::max<std::uint64_t>(1, link.byte_ps));
  fields["message_seconds"] = static_cast<double>(link.message_ns) * 1e-9;
  fields["byte_seconds"] = static_cast<double>(link.cpu_byte_ps) * 1e-12;
  return fields;
}

py::dict to_dict(const transport::Network& network) {
  py::dict fields;
  fields["hosts"] = transport::grouped(network.host_of);
  fields["sites"] = transport::grouped(network.site_of);
  fields["host"] = to_dict(network.host);
  fields["site"] = to_dict(network.site);
  fields["wan"] = to_dict(network.wan);
  return fields;
}

py::dict to_dict(const collective::GroupStats& stats) {
  py::list peers;
  for (const auto& peer : stats.peers) {
    py::dict one;
    one["rank"] = peer.rank;
    one["endpoint_id"] = peer.endpoint_id;
    one["path"] = peer.path;
    one["rtt_ms"] = peer.rtt_ms;
    one["bytes_sent"] = peer.sent_bytes;
    one["bytes_received"] = peer.received_bytes;
    peers.append(one);
  }
  py::dict all;
  all["collectives"] = stats.collectives;
  all["busy_seconds"] = stats.busy_seconds;
  all["peers"] = peers;
  all["plan"] = stats.plan;
  all["network"] = stats.network ? py::object(to_dict(*stats.network)) : py::none();
  py::list choices;
  for (const auto& one : stats.choices) {
    py::dict choice;
    choice["op"] = std::string(name_of(one.choice.op));
    choice["bytes"] = one.choice.bytes;
    choice["algorithm"] = std::string(name_of(one.choice.algorithm));
    choice["count"] = one.count;
    choice["predicted_seconds"] =
        one.choice.predicted_ns > 0 ? std::optional(static_cast<double>(one.choice.predicted_ns) * 1e-9) : std::nullopt;
    choice["mean_seconds"] = one.mean_seconds;
    choices.append(choice);
  }
  all["choices"] = choices;
  return all;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  py::module_::import("torch._C._distributed_c10d");  // registers the base classes
  module.attr("built_for_torch") = TORCH_IROH_BUILT_FOR_TORCH;

  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      py::set_error(error.kind() == ErrorKind::invalid ? PyExc_ValueError : PyExc_RuntimeError, error.what());
    }
  });

  py::class_<IrohOptions, ::c10d::Backend::Options, IrohOptionsPtr>(module, "Options", R"(
Options of backend "iroh", for ``dist.init_process_group("iroh", pg_options=...)`` and ``dist.new_group``.

All are keyword-only and optional. What is not set is taken from the environment variable ``TORCH_IROH_<NAME>``
(upper case), then from the default. ValueError: a value out of range; the text says what is allowed.

Of this group:
    chunk_bytes (int): size in bytes of the pieces that pipeline a collective; default 262144. The smallest value of
        all ranks counts. At the default, a group that has measured its links chooses 65536 or 1048576 where that is faster.
    algorithm (str): "auto" (default), "ring", "direct", "ring_bidirectional", "tree", "butterfly", "bruck" or
        "hierarchical"; equal on all ranks. An operation that it does not cover runs its nearest kin; error texts name what really ran.
    plan (str): instead of algorithm, one for each collective and size: "all_reduce<=64KiB=tree, all_reduce=ring/1MiB,
        *=auto". Rules are COLLECTIVE=ALGORITHM or COLLECTIVE<=SIZE=ALGORITHM, * is every collective, /SIZE a chunk, sizes
        are those of the whole in B, KiB, MiB or GiB; the first rule that holds decides, and where none does it is "auto".
        Ranks with different plans cannot make a group.
    connect (str): "lazy" (default) connects two ranks on their first exchange, "eager" all pairs at once.
    shared_memory (str): "auto" (default): ranks of one host exchange through its memory, large tensors in pieces that stay
        in the cache. "single_copy": they read large tensors out of each other, where the kernel permits it, which was
        slower wherever it was measured. "off": through iroh. The ranks of a host do what all of them want.
        An algorithm or a plan (other than auto) is for ranks that send to each other: then only their messages go through
        memory.
    probe (str): "auto" (default): a group of several hosts measures its links when it is made (one rank of each host,
        up to 4 MiB and a few hundred milliseconds), finds sites (hosts within 3 ms of each other) where none are named,
        and chooses algorithms by what a collective would take. "off", or an algorithm or plan: it does not, and fixed
        rules choose. All ranks of a group do what all of them want.
    site (str): ranks that name the same site have a fast network between them; equal on all ranks of a host. Hosts that
        name none join a site within 3 ms if links are measured, else they are sites of their own. Collectives may then go
        by levels (rank, host, site).
    compression (str): a codec for the sums and gathers of floats between sites, "none" (default) or one of
        ``torch_iroh.codec.names()``, with parameters ("int8:block=64"); equal on all ranks. Inside a site, and for
        integers, MIN, MAX, PRODUCT, broadcasts and what is too small to gain, everything is exact.
    inner (str): a backend of torch for the ranks of one host, in a group of several hosts; equal on all ranks. "auto"
        (default): NCCL for CUDA tensors, if torch has it and each rank had chosen a device of its own when the group was
        made. "nccl": that, or an error; "gloo": for CPU tensors; "none": iroh.

Of this process; the first group decides, later groups must leave them unset or equal:
    streams (int): data streams per peer at most, 1 to 64; default 16. As many are used as distance and loss ask for.
    peer_timeout (float): seconds of silence after which a peer is dead; default 3.
    heartbeat (float): seconds between signs of life, at most half of peer_timeout; default 0.5, or that half if less.
    connect_timeout (float): seconds to reach a peer; default 10.
    bind (str): "ip:port" to listen on, e.g. "127.0.0.1:0"; default: every interface, any port.
    relay (str): how peers are reached that cannot be reached directly: URLs of relays, separated by commas
        (``torch-iroh relay`` prints its own), "n0" for iroh's public relays, or "none", the default.
    relay_token (str): the password that these relays ask for. Better in TORCH_IROH_RELAY_TOKEN; repr does not show it.
    observer (str): endpoints that tell this process its address as seen from outside, "<id>@ip:port", separated by
        commas. Without one, two processes that are both behind a NAT meet on a relay only.

The group's timeout is ``init_process_group``'s ``timeout`` argument.
)")
      .def(py::init([](const py::kwargs& kwargs) {
        static const std::set<std::string> known = {
            "chunk_bytes", "algorithm",   "plan",    "probe",        "connect",   "shared_memory",   "site",
            "compression", "inner",       "streams", "peer_timeout", "heartbeat", "connect_timeout", "bind",
            "relay",       "relay_token", "observer"};
        for (const auto& [key, value] : kwargs) {
          const auto name = key.cast<std::string>();
          if (known.contains(name)) continue;
          std::string all;
          for (const auto& one : known) all += (all.empty() ? "" : ", ") + one;
          throw py::type_error("torch_iroh.Options has no option '" + name + "'; it has: " + all);
        }
        const auto get = [&]<typename T>(const char* name, std::optional<T> none) {
          if (!kwargs.contains(name)) return none;
          if (py::isinstance<py::bool_>(kwargs[name])) {
            throw py::type_error(std::string("torch_iroh.Options: ") + name + " must not be a bool");
          }
          try {
            return kwargs[name].cast<std::optional<T>>();
          } catch (const py::cast_error&) {
            const char* wanted = std::is_same_v<T, std::string> ? "str" : std::is_same_v<T, double> ? "float" : "int";
            throw py::type_error(std::string("torch_iroh.Options: ") + name + " must be " + wanted + " or None, not " +
                                 py::str(py::type::of(kwargs[name]).attr("__name__")).template cast<std::string>());
          }
        };
        return make_options(
            std::nullopt, get("chunk_bytes", std::optional<std::int64_t>()),
            get("algorithm", std::optional<std::string>()), get("plan", std::optional<std::string>()),
            get("connect", std::optional<std::string>()), get("shared_memory", std::optional<std::string>()),
            get("probe", std::optional<std::string>()), get("site", std::optional<std::string>()),
            get("compression", std::optional<std::string>()), get("inner", std::optional<std::string>()),
            get("streams", std::optional<std::int64_t>()), get("peer_timeout", std::optional<double>()),
            get("heartbeat", std::optional<double>()), get("connect_timeout", std::optional<double>()),
            get("bind", std::optional<std::string>()), get("relay", std::optional<std::string>()),
            get("relay_token", std::optional<std::string>()), get("observer", std::optional<std::string>()));
      }))
      .def_readonly("chunk_bytes", &IrohOptions::chunk_bytes)
      .def_readonly("algorithm", &IrohOptions::algorithm)
      .def_readonly("plan", &IrohOptions::plan)
      .def_readonly("connect", &IrohOptions::connect)
      .def_readonly("shared_memory", &IrohOptions::shared_memory)
      .def_readonly("probe", &IrohOptions::probe)
      .def_readonly("site", &IrohOptions::site)
      .def_readonly("compression", &IrohOptions::compression)
      .def_readonly("inner", &IrohOptions::inner)
      .def_readonly("streams", &IrohOptions::streams)
      .def_readonly("peer_timeout", &IrohOptions::peer_timeout)
      .def_readonly("heartbeat", &IrohOptions::heartbeat)
      .def_readonly("connect_timeout", &IrohOptions::connect_timeout)
      .def_readonly("bind", &IrohOptions::bind)
      .def_readonly("relay", &IrohOptions::relay)
      .def_readonly("relay_token", &IrohOptions::relay_token)
      .def_readonly("observer", &IrohOptions::observer)
      .def("__copy__", [](const IrohOptions& self) { return c10::make_intrusive<IrohOptions>(self); })
      .def("__deepcopy__",
           [](const IrohOptions& self, const py::dict&) { return c10::make_intrusive<IrohOptions>(self); })
      .def("__repr__", &repr);

  py::class_<ProcessGroupIroh, ::c10d::Backend, c10::intrusive_ptr<ProcessGroupIroh>>(module, "ProcessGroupIroh")
      .def(py::init<const c10::intrusive_ptr<::c10d::Store>&, int, int, IrohOptionsPtr>(), py::arg("store"),
           py::arg("rank"), py::arg("size"), py::arg("options"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("options", [](ProcessGroupIroh& self) { return self.getBackendOptions(); })
      .def(
          "monitored_barrier",
          [](ProcessGroupIroh& self, std::optional<std::chrono::milliseconds> timeout, bool wait_all_ranks) {
            ::c10d::BarrierOptions options;
            options.timeout = timeout.value_or(::c10d::kUnsetTimeout);
            self.monitoredBarrier(options, wait_all_ranks);
          },
          py::arg("timeout") = std::nullopt, py::arg("wait_all_ranks") = false,
          py::call_guard<py::gil_scoped_release>())
      // new_group calls it on ranks that are not in the new group when init_process_group was given a device_id; here
      // only members have to meet.
      .def(
          "perform_nocolor_split", [](const ProcessGroupIroh&, const py::object&) {}, py::arg("device"))
      .def("compressed_all_reduce", &ProcessGroupIroh::compressed_all_reduce, py::arg("tensor"), py::arg("op"),
           py::arg("codec"), py::arg("residual"), py::arg("timeout"), py::call_guard<py::gil_scoped_release>())
      .def("compresses", &ProcessGroupIroh::compresses, py::arg("tensor"), py::arg("codec"))
      .def("get_error", &ProcessGroupIroh::getError, py::call_guard<py::gil_scoped_release>())
      .def("_set_default_timeout", &ProcessGroupIroh::setTimeout, py::arg("timeout"))
      .def("stats", [](const ProcessGroupIroh& self) {
        const auto stats = [&] {
          const py::gil_scoped_release release;
          return self.stats();
        }();
        return to_dict(stats);
      });

  set_inner_maker({
      [] {
        const py::gil_scoped_acquire gil;
        const auto facts = py::module_::import("torch_iroh._inner").attr("facts")();
        return InnerFacts{facts.attr("has_nccl").cast<bool>(), facts.attr("device").cast<std::string>()};
      },
      [](const std::string& name, const c10::intrusive_ptr<::c10d::Store>& store, const std::string& prefix, int rank,
         int size, std::chrono::milliseconds timeout) {
        const py::gil_scoped_acquire gil;
        const auto make = py::module_::import("torch_iroh._inner").attr("make");
        return make(name, store, prefix, rank, size, timeout).cast<c10::intrusive_ptr<::c10d::Backend>>();
      },
  });
  set_group_preparer([](bool network) {
    const py::gil_scoped_acquire gil;
    py::module_::import("torch_iroh._native").attr("prepare_group")(network);
  });
  module.def("set_thread_compression", &set_thread_compression, py::arg("codec"));
  module.def("leave_all_process_groups", &leave_all_process_groups, py::call_guard<py::gil_scoped_release>());
  module.def("finish_callbacks", &finish_callbacks, py::arg("limit"), py::call_guard<py::gil_scoped_release>());
  module.def("open_library", &iroh::Library::open, py::arg("path"), py::arg("installed_version"));
}

}  // namespace torch_iroh::c10d_backend
