#include "collective/ledger.hpp"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdio>
#include <string>

#include "base/log.hpp"

namespace torch_iroh::collective {
namespace {

constexpr std::uint64_t kLargest = std::uint64_t{1} << 62;

double seconds(Duration duration) {
  return std::chrono::duration<double>(duration).count();
}

std::string time_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, seconds < 1 ? "%.3g ms" : "%.3g s", seconds < 1 ? seconds * 1e3 : seconds);
  return text;
}

std::string size_text(std::uint64_t bytes) {
  int unit = 0;
  for (; bytes >= 1024 && unit < 3; ++unit) bytes /= 1024;
  static constexpr const char* kUnits[] = {" bytes", " KiB", " MiB", " GiB"};
  return std::to_string(bytes) + kUnits[unit];
}

}  // namespace

void Ledger::add(const Choice& choice, Duration took) {
  const std::uint64_t bytes = std::bit_ceil(std::min(choice.bytes, kLargest));
  Line line;
  {
    const std::lock_guard lock(mutex_);
    Line& own = lines_[{choice.op, bytes, choice.algorithm}];
    own.predicted_ns = choice.predicted_ns;
    (own.count++ == 0 ? own.first : own.others) += took;
    line = own;
  }
  // The first may have had to connect: no prediction is about that.
  if (line.count != 2 || choice.predicted_ns == 0) return;
  log(LogLevel::info, std::string(name_of(choice.op)) + " " + size_text(bytes) + ", " +
                          std::string(name_of(choice.algorithm)) + ": predicted " +
                          time_text(static_cast<double>(choice.predicted_ns) * 1e-9) + ", took " +
                          time_text(seconds(took)));
}

std::vector<ChoiceStats> Ledger::all() const {
  std::vector<ChoiceStats> all;
  const std::lock_guard lock(mutex_);
  for (const auto& [key, line] : lines_) {
    const auto& [op, bytes, algorithm] = key;
    const double mean =
        line.count > 1 ? seconds(line.others) / static_cast<double>(line.count - 1) : seconds(line.first);
    all.push_back({{op, algorithm, bytes, line.predicted_ns}, line.count, mean});
  }
  return all;
}

}  // namespace torch_iroh::collective
