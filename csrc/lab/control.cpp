#include "control.hpp"

#include <charconv>
#include <cmath>
#include <map>
#include <stdexcept>
#include <vector>

namespace torch_iroh::lab {
namespace {

constexpr std::size_t kMaxNameBytes = 64;
constexpr double kMaxMilliseconds = 60'000;
constexpr double kMaxMegabits = 1e6;
constexpr double kMaxMtu = 65'535;

std::vector<std::string_view> words_of(std::string_view line) {
  std::vector<std::string_view> words;
  while (true) {
    const std::size_t begin = line.find_first_not_of(' ');
    if (begin == std::string_view::npos) return words;
    line.remove_prefix(begin);
    const std::size_t end = std::min(line.find(' '), line.size());
    words.push_back(line.substr(0, end));
    line.remove_prefix(end);
  }
}

// The words of one command, taken one after the other; what nobody takes is an error.
class Words {
 public:
  explicit Words(std::string_view line) : positional_(words_of(line)) {
    while (!positional_.empty() && positional_.back().find('=') != std::string_view::npos) {
      const std::string_view word = positional_.back();
      const std::size_t equals = word.find('=');
      if (!settings_.emplace(word.substr(0, equals), word.substr(equals + 1)).second) {
        throw std::invalid_argument("'" + std::string(word) + "' is said twice");
      }
      positional_.pop_back();
    }
  }
  std::string_view next(const char* what) {
    if (at_ == positional_.size()) throw std::invalid_argument(std::string("no ") + what + " given");
    const std::string_view word = positional_[at_++];
    if (word.size() > kMaxNameBytes) throw std::invalid_argument(std::string(what) + " is too long");
    for (const char c : word) {  // names stand in JSON as they are
      if (c <= ' ' || c > '~' || c == '"' || c == '\\')
        throw std::invalid_argument(std::string(what) + " has odd letters");
    }
    return word;
  }
  bool more() const { return at_ < positional_.size(); }
  std::optional<std::string_view> setting(std::string_view key) {
    const auto found = settings_.find(key);
    if (found == settings_.end()) return std::nullopt;
    const std::string_view value = found->second;
    settings_.erase(found);
    return value;
  }
  void done() const {
    if (more()) throw std::invalid_argument("'" + std::string(positional_[at_]) + "' is one word too many");
    if (settings_.empty()) return;
    throw std::invalid_argument("'" + std::string(settings_.begin()->first) + "' cannot be set here");
  }

 private:
  std::vector<std::string_view> positional_;
  std::size_t at_ = 0;
  std::map<std::string_view, std::string_view> settings_;
};

double number(std::string_view key, std::string_view text, double most) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size() && value >= 0 && value <= most) return value;
  throw std::invalid_argument(std::string(key) + "=" + std::string(text) + " is not a number from 0 to " +
                              std::to_string(std::llround(most)));
}

Nanoseconds milliseconds(std::string_view key, std::string_view text) {
  return Nanoseconds(std::llround(number(key, text, kMaxMilliseconds) * 1e6));
}

bool flag(std::string_view key, std::string_view text) {
  if (text == "0" || text == "1") return text == "1";
  throw std::invalid_argument(std::string(key) + " is 0 or 1, not " + std::string(text));
}

template <typename T, typename Read>
void set(std::optional<T>& field, Words& words, std::string_view key, Read read) {
  const auto text = words.setting(key);
  if (!text) return;
  if (*text == "inherit") {
    field.reset();
  } else {
    field = read(key, *text);
  }
}

Rule changed(Rule rule, Words& words) {
  set(rule.delay, words, "delay", milliseconds);
  set(rule.jitter, words, "jitter", milliseconds);
  set(rule.loss, words, "loss", [](auto key, auto text) { return number(key, text, 100) / 100; });
  set(rule.reorder, words, "reorder", flag);
  if (const auto text = words.setting("cut")) rule.cut = flag("cut", *text);
  words.done();
  return rule;
}

void change_line(Site& site, Words& words) {
  Line line = site.line;
  bool cut = site.cut;
  bool plugged = site.plugged;
  if (const auto text = words.setting("up")) line.up_bits_per_second = number("up", *text, kMaxMegabits) * 1e6;
  if (const auto text = words.setting("down")) line.down_bits_per_second = number("down", *text, kMaxMegabits) * 1e6;
  if (const auto text = words.setting("mtu")) line.mtu = static_cast<std::size_t>(number("mtu", *text, kMaxMtu));
  if (const auto text = words.setting("queue")) line.queue = milliseconds("queue", *text);
  if (const auto text = words.setting("cut")) cut = flag("cut", *text);
  if (const auto text = words.setting("plugged")) plugged = flag("plugged", *text);
  words.done();
  site.line = line;
  site.cut = cut;
  site.plugged = plugged;
}

}  // namespace

std::string Control::handle(std::string_view request) {
  std::string reply = "ok";
  while (!request.empty()) {
    const std::size_t end = std::min(request.find('\n'), request.size());
    const std::string_view line = request.substr(0, end);
    request.remove_prefix(std::min(end + 1, request.size()));
    if (line.find_first_not_of(' ') == std::string_view::npos) continue;
    try {
      reply = run(line);
    } catch (const std::exception& error) {
      return "error: " + std::string(line.substr(0, kMaxNameBytes)) + ": " + error.what();
    }
  }
  return reply;
}

std::string Control::run(std::string_view line) {
  Words words(line);
  const std::string_view command = words.next("command");
  if (command == "site") {
    const std::string_view name = words.next("name");
    const std::string space(words.next("namespace"));
    const std::string_view region = words.next("region");
    words.done();
    network_.require_new(name);
    open_(space);
    network_.add_site(name, region);
  } else if (command == "route") {
    Site& site = network_.site(network_.find(words.next("name")));
    std::vector<Prefix> prefixes;
    while (words.more()) prefixes.push_back(Prefix::parse(words.next("prefix")));
    words.done();
    site.prefixes = std::move(prefixes);
  } else if (command == "line") {
    Site& site = network_.site(network_.find(words.next("name")));
    change_line(site, words);
  } else if (command == "everywhere") {
    network_.everywhere() = changed(network_.everywhere(), words);
  } else if (command == "regions") {
    const std::string_view from = words.next("region");
    Rule& rule = network_.between_regions(from, words.next("region"));
    rule = changed(rule, words);
  } else if (command == "sites") {
    const SiteId from = network_.find(words.next("name"));
    Rule& rule = network_.between_sites(from, network_.find(words.next("name")));
    rule = changed(rule, words);
  } else if (command == "counters") {
    words.done();
    return counters();
  } else if (command == "traffic") {
    words.done();
    return traffic();
  } else {
    throw std::invalid_argument("there is no such command");
  }
  return "ok";
}

std::string Control::counters() const {
  std::string text = "{";
  for (const Site& site : network_.sites()) {
    const Counters& c = site.counters;
    text += (text.size() > 1 ? ",\"" : "\"") + site.name + "\":{";
    const std::pair<const char*, std::uint64_t> fields[] = {{"sent_packets", c.sent_packets},
                                                            {"sent_bytes", c.sent_bytes},
                                                            {"received_packets", c.received_packets},
                                                            {"received_bytes", c.received_bytes},
                                                            {"lost", c.lost},
                                                            {"cut", c.cut},
                                                            {"unroutable", c.unroutable},
                                                            {"too_big", c.too_big},
                                                            {"up_dropped", c.up_dropped},
                                                            {"down_dropped", c.down_dropped},
                                                            {"malformed", c.malformed},
                                                            {"overflow", c.overflow},
                                                            {"refused", c.refused}};
    for (const auto& [key, value] : fields) text += "\"" + std::string(key) + "\":" + std::to_string(value) + ",";
    text.back() = '}';
  }
  return text + "}";
}

std::string Control::traffic() const {
  std::string text = "[";
  for (const auto& [pair, traffic] : network_.traffic()) {
    if (text.size() > 1) text += ",";
    text += "[\"" + network_.sites()[pair.first].name + "\",\"" + network_.sites()[pair.second].name + "\"," +
            std::to_string(traffic.packets) + "," + std::to_string(traffic.bytes) + "]";
  }
  return text + "]";
}

}  // namespace torch_iroh::lab
