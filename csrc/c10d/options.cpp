#include "c10d/options.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "base/bytes.hpp"
#include "collective/chooser.hpp"
#include "link/frame.hpp"

namespace torch_iroh::c10d_backend {
namespace {

std::optional<std::string> environment(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return std::nullopt;
  return text;
}

[[noreturn]] void refuse(const std::string& what, const std::string& given, const std::string& allowed) {
  throw Error(ErrorKind::invalid, "torch-iroh option " + what + " is " + given + "; allowed: " + allowed);
}

std::optional<std::string> text_option(const std::optional<std::string>& set, const char* variable) {
  return set ? set : environment(variable);
}

std::optional<double> number_option(const std::optional<double>& set, const char* variable) {
  if (set) return set;
  const auto text = environment(variable);
  if (!text) return std::nullopt;
  char* end = nullptr;
  const double value = std::strtod(text->c_str(), &end);
  if (end == text->c_str() || *end != '\0') refuse(variable, "'" + *text + "'", "a number");
  return value;
}

std::optional<std::int64_t> integer_option(const std::optional<std::int64_t>& set, const char* variable) {
  if (set) return set;
  const auto value = number_option(std::nullopt, variable);
  if (!value) return std::nullopt;
  if (*value != std::floor(*value) || std::abs(*value) > 1e15)
    refuse(variable, "'" + *environment(variable) + "'", "a whole number");
  return static_cast<std::int64_t>(*value);
}

void within(const char* name, double value, double low, double high, const char* unit) {
  if (value >= low && value <= high) return;
  const auto text = [](double number) {
    std::string digits = std::to_string(number);
    digits.erase(digits.find_last_not_of('0') + 1);
    if (digits.back() == '.') digits.pop_back();
    return digits;
  };
  refuse(name, text(value), text(low) + " to " + text(high) + unit);
}

Duration seconds(double value) {
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(value));
}

}  // namespace

std::uint32_t IrohOptions::resolved_chunk_bytes() const {
  const auto value = static_cast<double>(
      integer_option(chunk_bytes, "TORCH_IROH_CHUNK_BYTES").value_or(collective::kDefaultChunkBytes));
  within("chunk_bytes", value, 1024, link::kMaxFrameBytes, " bytes");
  // A whole number of every dtype's elements.
  return static_cast<std::uint32_t>(value) & ~std::uint32_t{63};
}

collective::Pins IrohOptions::resolved_pins() const {
  if (plan && algorithm) {
    refuse("algorithm", "'" + *algorithm + "' beside a plan", "one of them; a plan of one algorithm is '*=ALGORITHM'");
  }
  // An option goes before the variable of the other one, too.
  const auto text = algorithm ? plan : text_option(plan, "TORCH_IROH_PLAN");
  const auto one = plan ? algorithm : text_option(algorithm, "TORCH_IROH_ALGORITHM");
  if (text && one) refuse("TORCH_IROH_ALGORITHM", "set beside TORCH_IROH_PLAN", "one of them");
  if (text) return collective::Pins::parse(*text);
  const std::string name = one.value_or("auto");
  if (name == "auto") return {};
  std::string allowed = "'auto'";
  for (int i = 0; i < collective::kAlgorithmCount; ++i) {
    const auto value = static_cast<collective::Algorithm>(i);
    if (name_of(value) == name) return collective::Pins::everything(value);
    allowed += ", '" + std::string(name_of(value)) + "'";
  }
  refuse("algorithm", "'" + name + "'", allowed);
}

bool IrohOptions::resolved_eager() const {
  const std::string name = text_option(connect, "TORCH_IROH_CONNECT").value_or("lazy");
  if (name != "lazy" && name != "eager") refuse("connect", "'" + name + "'", "'lazy', 'eager'");
  return name == "eager";
}

std::string IrohOptions::resolved_site() const {
  constexpr std::size_t kMostBytes = 100;
  const std::string name = text_option(site, "TORCH_IROH_SITE").value_or("");
  if (name.size() > kMostBytes || printable(name) != name) {
    refuse("site", "'" + printable(name) + "'", "up to 100 printable ASCII characters");
  }
  return name;
}

std::string IrohOptions::resolved_inner() const {
  std::string name = text_option(inner, "TORCH_IROH_INNER").value_or("auto");
  if (name != "auto" && name != "nccl" && name != "gloo" && name != "none") {
    refuse("inner", "'" + printable(name) + "'", "'auto', 'nccl', 'gloo', 'none'");
  }
  return name;
}

codec::Codec IrohOptions::resolved_compression() const {
  return codec::parse(text_option(compression, "TORCH_IROH_COMPRESSION").value_or("none"));
}

bool IrohOptions::resolved_probe() const {
  const std::string name = text_option(probe, "TORCH_IROH_PROBE").value_or("auto");
  if (name != "auto" && name != "off") refuse("probe", "'" + name + "'", "'auto', 'off'");
  // Who fixes how collectives run asks no link.
  return name == "auto" && resolved_pins().empty();
}

transport::Sharing IrohOptions::resolved_shared_memory() const {
  using transport::Sharing;
  const std::string name = text_option(shared_memory, "TORCH_IROH_SHARED_MEMORY").value_or("auto");
  if (name != "auto" && name != "single_copy" && name != "off") {
    refuse("shared_memory", "'" + name + "'", "'auto', 'single_copy', 'off'");
  }
  if (name == "off") return Sharing::none;
  return name == "auto" ? Sharing::windows : Sharing::direct;
}

link::NodeOptions IrohOptions::resolved_node_options() const {
  link::NodeOptions options = link::Node::running_options().value_or(link::NodeOptions{});
  if (const auto value = integer_option(streams, "TORCH_IROH_STREAMS")) {
    within("streams", static_cast<double>(*value), 1, link::HelloBody::kMaxLanes - 1, "");
    options.link.streams = static_cast<int>(*value);
  }
  if (const auto value = number_option(peer_timeout, "TORCH_IROH_PEER_TIMEOUT")) {
    within("peer_timeout", *value, 0.2, 3600, " seconds");
    options.link.peer_timeout = seconds(*value);
    options.link.heartbeat = std::min(options.link.heartbeat, options.link.peer_timeout / 2);
  }
  if (const auto value = number_option(heartbeat, "TORCH_IROH_HEARTBEAT")) {
    within("heartbeat", *value, 0.02, 1200, " seconds");
    options.link.heartbeat = seconds(*value);
  }
  if (const auto value = number_option(connect_timeout, "TORCH_IROH_CONNECT_TIMEOUT")) {
    within("connect_timeout", *value, 0.1, 3600, " seconds");
    options.link.connect_timeout = seconds(*value);
  }
  if (options.link.heartbeat * 2 > options.link.peer_timeout) {
    refuse("heartbeat", to_text(options.link.heartbeat),
           "at most half of peer_timeout (" + to_text(options.link.peer_timeout) + ")");
  }
  if (auto value = text_option(bind, "TORCH_IROH_BIND")) {
    if (!iroh::is_socket_address(*value)) {
      refuse("bind", "'" + *value + "'", "\"ip:port\", for example \"127.0.0.1:0\" (port 0: any)");
    }
    options.bind_addr = std::move(*value);
  }
  if (const auto value = text_option(relay, "TORCH_IROH_RELAY")) {
    link::parse_relays(*value, text_option(relay_token, "TORCH_IROH_RELAY_TOKEN"), options.reach);
  } else if (relay_token) {
    refuse("relay_token", "set without relay", "a relay beside it");
  }
  if (const auto value = text_option(observer, "TORCH_IROH_OBSERVER")) {
    options.reach.observers = link::parse_observers(*value);
  }
  return options;
}

}  // namespace torch_iroh::c10d_backend
