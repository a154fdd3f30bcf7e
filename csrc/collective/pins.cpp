#include "collective/pins.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <numeric>
#include <utility>

#include "base/bytes.hpp"
#include "base/error.hpp"
#include "link/frame.hpp"

namespace torch_iroh::collective {
namespace {

constexpr int kOps = static_cast<int>(Op::barrier) + 1;
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 50;
constexpr std::size_t kLeastChunk = 1024;
constexpr std::array<std::pair<std::string_view, int>, 5> kUnits = {
    {{"", 0}, {"B", 0}, {"KiB", 10}, {"MiB", 20}, {"GiB", 30}}};

template <typename Enum>
std::optional<Enum> named(std::string_view name, int count) {
  for (int i = 0; i < count; ++i) {
    if (name_of(static_cast<Enum>(i)) == name) return static_cast<Enum>(i);
  }
  return std::nullopt;
}

template <typename Enum>
std::string list_of(int count) {
  std::string all;
  for (int i = 0; i < count; ++i) all += ", " + std::string(name_of(static_cast<Enum>(i)));
  return all;
}

[[noreturn]] void refuse(std::size_t number, const std::string& fact) {
  throw Error(ErrorKind::invalid, "torch-iroh option plan, rule " + std::to_string(number) + ": " + fact);
}

std::string quoted(std::string_view text) {
  return "'" + printable(std::string(text.substr(0, 60))) + "'";
}

std::uint64_t size_of_text(std::string_view text, std::size_t number) {
  std::uint64_t value = 0;
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string_view unit = text.substr(static_cast<std::size_t>(end - text.data()));
  const auto known = std::find_if(kUnits.begin(), kUnits.end(), [&](const auto& one) { return one.first == unit; });
  if (failed != std::errc() || known == kUnits.end() || value > kMostBytes >> known->second) {
    refuse(number, quoted(text) + " is no size; allowed: a whole number of B, KiB, MiB or GiB, like 64KiB, at most " +
                       std::to_string(kMostBytes >> 30) + "GiB");
  }
  return value << known->second;
}

// Whether the algorithm has a maker for the operation, in some world.
bool covers(Algorithm algorithm, Op op) {
  if (algorithm == Algorithm::hierarchical) return op != Op::all_to_all;
  Request request;
  request.op = op;
  request.world = 2;
  return supports(algorithm, request);
}

std::string text_of(std::uint64_t bytes) {
  for (auto unit = kUnits.rbegin(); unit != kUnits.rend(); ++unit) {
    if (bytes == 0 || unit->second == 0) break;
    if (bytes % (std::uint64_t{1} << unit->second) == 0)
      return std::to_string(bytes >> unit->second) + std::string(unit->first);
  }
  return std::to_string(bytes) + "B";
}

}  // namespace

Pins::Rule Pins::rule_of(std::string_view text, std::size_t number) {
  Rule rule;
  const std::size_t below = text.find("<=");
  const std::size_t equals = text.find('=', below == text.npos ? 0 : below + 2);
  if (equals == text.npos) {
    refuse(number, quoted(text) +
                       " is no rule; allowed: COLLECTIVE=ALGORITHM or COLLECTIVE<=SIZE=ALGORITHM, like "
                       "all_reduce<=64KiB=tree");
  }
  const std::string_view op = text.substr(0, std::min(below, equals));
  rule.op = named<Op>(op, kOps);
  if (!rule.op && op != "*") refuse(number, quoted(op) + " is no collective; allowed: *" + list_of<Op>(kOps));
  if (below != text.npos) rule.most = size_of_text(text.substr(below + 2, equals - below - 2), number);
  if (rule.most && rule.op == Op::all_to_all) {
    refuse(number, "gives a size for all_to_all, whose size the ranks do not know alike. Try: all_to_all=ALGORITHM");
  }
  const std::size_t slash = text.find('/', equals);
  const std::string_view algorithm = text.substr(equals + 1, slash == text.npos ? slash : slash - equals - 1);
  rule.pin.algorithm = named<Algorithm>(algorithm, kAlgorithmCount);
  if (!rule.pin.algorithm && algorithm != "auto") {
    refuse(number, quoted(algorithm) + " is no algorithm; allowed: auto" + list_of<Algorithm>(kAlgorithmCount));
  }
  if (rule.op && rule.pin.algorithm && !covers(*rule.pin.algorithm, *rule.op)) {
    std::string fit = "auto";
    for (int i = 0; i < kAlgorithmCount; ++i) {
      const auto one = static_cast<Algorithm>(i);
      if (covers(one, *rule.op)) fit += ", " + std::string(name_of(one));
    }
    refuse(number,
           std::string(algorithm) + " cannot run " + std::string(name_of(*rule.op)) + "; allowed for it: " + fit);
  }
  if (slash != text.npos) {
    const std::uint64_t chunk = size_of_text(text.substr(slash + 1), number);
    if (chunk < kLeastChunk || chunk > link::kMaxFrameBytes || chunk % 64 != 0) {
      refuse(number, "a chunk of " + quoted(text.substr(slash + 1)) + "; allowed: 1KiB to 1MiB, a multiple of 64B");
    }
    rule.pin.chunk_bytes = static_cast<std::size_t>(chunk);
  }
  return rule;
}

// A rule that never holds is a mistake of whoever wrote it.
void Pins::add(const Rule& rule, std::size_t number) {
  for (std::size_t i = 0; i < rules_.size(); ++i) {
    const Rule& earlier = rules_[i];
    const bool same_ops = !earlier.op || earlier.op == rule.op;
    const bool same_sizes = !earlier.most || (rule.most && *rule.most <= *earlier.most);
    if (same_ops && same_sizes) {
      refuse(number, "never holds, because rule " + std::to_string(i + 1) +
                         " comes first. Try: the special rules before the general ones");
    }
  }
  rules_.push_back(rule);
  std::string text = rule.op ? std::string(name_of(*rule.op)) : "*";
  if (rule.most) text += "<=" + text_of(*rule.most);
  text += "=" + (rule.pin.algorithm ? std::string(name_of(*rule.pin.algorithm)) : std::string("auto"));
  if (rule.pin.chunk_bytes > 0) text += "/" + text_of(rule.pin.chunk_bytes);
  text_ += (text_.empty() ? "" : ", ") + text;
}

Pins Pins::parse(std::string_view text) {
  if (text.size() > kMostPinBytes) {
    throw Error(ErrorKind::invalid, "torch-iroh option plan: a text of " + std::to_string(text.size()) +
                                        " bytes; allowed: at most " + std::to_string(kMostPinBytes));
  }
  std::string dense(text);
  std::erase(dense, ' ');
  if (dense.empty()) {
    throw Error(ErrorKind::invalid,
                "torch-iroh option plan: an empty text; allowed: rules like all_reduce<=64KiB=tree, *=auto");
  }
  Pins pins;
  std::string_view left = dense;
  for (std::size_t number = 1;; ++number) {
    const std::size_t comma = left.find(',');
    pins.add(rule_of(left.substr(0, comma), number), number);
    if (comma == left.npos) break;
    left.remove_prefix(comma + 1);
  }
  if (pins.empty()) pins.text_.clear();
  return pins;
}

Pins Pins::everything(Algorithm algorithm) {
  Pins pins;
  pins.add({std::nullopt, std::nullopt, {algorithm, 0}}, 1);
  return pins;
}

Pin Pins::find(Op op, std::optional<std::uint64_t> bytes) const {
  for (const Rule& rule : rules_) {
    if ((!rule.op || rule.op == op) && (!rule.most || (bytes && *bytes <= *rule.most))) return rule.pin;
  }
  return {};
}

bool Pins::empty() const {
  return std::all_of(rules_.begin(), rules_.end(),
                     [](const Rule& rule) { return !rule.pin.algorithm && rule.pin.chunk_bytes == 0; });
}

bool Pins::names(Algorithm algorithm) const {
  return std::any_of(rules_.begin(), rules_.end(),
                     [algorithm](const Rule& rule) { return rule.pin.algorithm == algorithm; });
}

std::optional<std::uint64_t> known_bytes(const Request& request, std::size_t element_bytes) {
  if (request.op == Op::all_to_all && !request.even) return std::nullopt;
  return std::accumulate(request.blocks.begin(), request.blocks.end(), request.count) * element_bytes;
}

Pin pin_for(const Pins& pins, const Request& request, std::size_t element_bytes) {
  return pins.find(request.op, known_bytes(request, element_bytes));
}

}  // namespace torch_iroh::collective
