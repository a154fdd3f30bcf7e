// Plans: what each algorithm would take on given links, by simulation. Connects to nothing.
#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "collective/hierarchy.hpp"
#include "collective/pins.hpp"
#include "collective/planner.hpp"
#include "collective/simulator.hpp"
#include "python/module.hpp"

namespace py = pybind11;

namespace torch_iroh::python {
namespace {

using namespace collective;

// Each rank's schedule of such an operation reads all blocks: planning takes the square of this.
constexpr std::int32_t kMostRanksWithBlocks = 16'384;

// Levels that are not uniform are lists of all ranks.
constexpr std::int32_t kMostListedRanks = 65'536;

template <typename Enum>
std::vector<std::string> names_of(int last) {
  std::vector<std::string> names;
  for (int i = 0; i <= last; ++i) {
    const auto name = name_of(static_cast<Enum>(i));
    if (name == "?") break;
    names.emplace_back(name);
  }
  return names;
}

template <typename Enum>
Enum find(const std::string& name, const char* what) {
  std::string known;
  const std::vector<std::string> names = names_of<Enum>(63);
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i] == name) return static_cast<Enum>(i);
    known += (i == 0 ? "" : ", ") + names[i];
  }
  throw std::invalid_argument("unknown " + std::string(what) + " '" + name + "'; known: " + known);
}

Link link_of(const py::dict& fields) {
  Link link;
  link.latency = fields["latency"].cast<double>();
  link.bandwidth = fields["bandwidth"].cast<double>();
  link.jitter = fields["jitter"].cast<double>();
  link.message_cost = fields["message_seconds"].cast<double>();
  link.byte_cost = fields["byte_seconds"].cast<double>();
  return link;
}

// `bytes` of the whole, split evenly where the operation has blocks.
Request request_of(Op op, std::int32_t world, std::uint64_t elements) {
  Request request;
  request.op = op;
  request.world = world;
  switch (op) {
    case Op::all_reduce:
    case Op::reduce:
    case Op::broadcast: request.count = elements; return request;
    case Op::barrier: return request;
    default: break;
  }
  if (world > kMostRanksWithBlocks) {
    throw std::invalid_argument(std::string(name_of(op)) + " has a block for each rank and is planned for at most " +
                                std::to_string(kMostRanksWithBlocks) + " ranks");
  }
  if (op == Op::all_to_all) {
    // All pairs alike: what two ranks exchange must be equal at both ends.
    request.blocks.assign(static_cast<std::size_t>(world), elements / static_cast<std::uint64_t>(world));
    request.send_blocks = request.blocks;
    return request;
  }
  for (std::int32_t rank = 0; rank < world; ++rank) request.blocks.push_back(shard_of(elements, world, rank).count);
  return request;
}

std::vector<std::vector<std::int32_t>> consecutive(std::int32_t world, std::int64_t size) {
  std::vector<std::vector<std::int32_t>> groups;
  for (std::int32_t rank = 0; rank < world; ++rank) {
    if (rank % size == 0) groups.emplace_back();
    groups.back().push_back(rank);
  }
  return groups;
}

// Hosts and sites as the model has them. Null where that takes lists above their bound.
std::shared_ptr<const Hierarchy> hierarchy_of(std::int32_t world, const LinkModel& model) {
  const std::int64_t host = std::min(model.ranks_per_host, world);
  const std::int64_t site = std::min<std::int64_t>(host * model.hosts_per_site, world);
  if (world % site == 0 && site % host == 0) {
    std::vector<std::int32_t> sizes;
    for (const std::int64_t size : {host, site / host, world / site}) {
      if (size > 1) sizes.push_back(static_cast<std::int32_t>(size));
    }
    return std::make_shared<const Hierarchy>(Hierarchy::uniform(sizes));
  }
  if (world > kMostListedRanks) return nullptr;
  return std::make_shared<const Hierarchy>(
      Hierarchy::of_groups(world, {consecutive(world, host), consecutive(world, site)}));
}

// "8x125x10, at most 32: groups of 8, 25, 5, 10".
std::string text_of(const Hierarchy& hierarchy) {
  if (hierarchy.depth() == 0) return "";
  std::string text = hierarchy.text() + ": groups of ";
  for (std::size_t level = 0; level < hierarchy.depth(); ++level) {
    const Partition& groups = hierarchy.level(level);
    text += (level == 0 ? "" : ", ") + std::to_string(groups.smallest());
    if (groups.largest() > groups.smallest()) text += "-" + std::to_string(groups.largest());
  }
  return text;
}

std::string uneven_text(std::int32_t world) {
  return std::to_string(world) +
         " ranks do not fill their hosts and sites evenly: such levels are planned for at most " +
         std::to_string(kMostListedRanks) + " ranks";
}

struct Tried {
  std::string algorithm;
  std::optional<Prediction> prediction;
  std::string refused;  // why there is none
  std::string levels;   // of hierarchical
};

Tried try_one(Request request, Algorithm algorithm, std::size_t element_bytes, const LinkModel& model) {
  Tried tried{std::string(name_of(algorithm)), {}, {}, {}};
  request.algorithm = algorithm;
  if (algorithm == Algorithm::hierarchical) tried.levels = text_of(*request.hierarchy);
  try {
    tried.prediction = predict(request, element_bytes, model);
  } catch (const std::invalid_argument& error) {
    tried.refused = error.what();
  }
  return tried;
}

py::dict to_dict(const Tried& tried, std::size_t chunk_bytes) {
  py::dict found;
  found["algorithm"] = tried.algorithm;
  if (!tried.prediction) {
    found["refused"] = tried.refused;
    return found;
  }
  const Prediction& one = *tried.prediction;
  found["predicted_seconds"] = one.seconds;
  found["median_seconds"] = one.median_seconds;
  found["messages_per_rank"] = one.messages;
  found["bytes_per_rank"] = one.bytes;
  found["fan_out"] = one.fan_out;
  found["depth"] = one.depth;
  found["levels"] = tried.levels;
  found["method"] = std::string(name_of(one.method));
  found["simulated_ranks"] = one.simulated_ranks;
  found["simulated_chunk_bytes"] = std::max(one.chunk_bytes, chunk_bytes);
  return found;
}

std::vector<py::dict> plan(const std::string& op_name, std::uint64_t bytes, std::int32_t world,
                           std::int32_t ranks_per_host, std::int32_t hosts_per_site, const py::dict& host,
                           const py::dict& site, const py::dict& wan, double local_byte_seconds,
                           const std::string& algorithm, const std::string& dtype_name, std::size_t chunk_bytes,
                           std::uint64_t seed) {
  const Op op = find<Op>(op_name, "collective");
  const std::size_t element_bytes = size_of(find<DType>(dtype_name, "dtype"));
  LinkModel model{link_of(host), link_of(site), link_of(wan), ranks_per_host, hosts_per_site};
  model.local_byte_cost = local_byte_seconds;
  model.chunk_bytes = chunk_bytes;
  model.seed = seed;
  std::vector<Tried> tried;
  {
    const py::gil_scoped_release release;
    Request request = request_of(op, world, bytes / element_bytes);
    request.hierarchy = hierarchy_of(world, model);
    request.even = algorithm == "bruck";  // a group's ranks do not know that of each other
    const std::vector<std::string> names =
        algorithm == "auto" ? names_of<Algorithm>(63) : std::vector<std::string>{algorithm};
    for (const std::string& name : names) {
      const auto wanted = find<Algorithm>(name, "algorithm");
      if (wanted == Algorithm::hierarchical && !request.hierarchy) {
        tried.push_back({name, {}, uneven_text(world), {}});
        continue;
      }
      // An operation with one way only ignores what is asked: it is tried under its own name.
      const Algorithm used = choose_algorithm(request, element_bytes, wanted);
      if (used != wanted && algorithm == "auto") continue;
      tried.push_back(try_one(request, used, element_bytes, model));
    }
  }
  std::vector<py::dict> found;
  for (const Tried& one : tried) found.push_back(to_dict(one, chunk_bytes));
  return found;
}

// What a plan of Options(plan=...) fixes for this collective: an algorithm or "auto", and a chunk or 0.
std::pair<std::string, std::size_t> pinned(const std::string& text, const std::string& op, std::uint64_t bytes) {
  const Pin pin = Pins::parse(text).find(find<Op>(op, "collective"), bytes);
  return {pin.algorithm ? std::string(name_of(*pin.algorithm)) : "auto", pin.chunk_bytes};
}

}  // namespace

void bind_plan(py::module_& module) {
  module.def("plan", &plan, py::arg("op"), py::arg("bytes"), py::arg("world"), py::arg("ranks_per_host"),
             py::arg("hosts_per_site"), py::arg("host"), py::arg("site"), py::arg("wan"), py::arg("local_byte_seconds"),
             py::arg("algorithm"), py::arg("dtype"), py::arg("chunk_bytes"), py::arg("seed"));
  module.def("pinned", &pinned, py::arg("plan"), py::arg("op"), py::arg("bytes"));
  module.def("algorithms", [] { return names_of<Algorithm>(63); });
  module.def("collectives", [] { return names_of<Op>(63); });
}

}  // namespace torch_iroh::python
