// A sample tells a threshold that is very likely a little too low; one pass over the values collects those above it,
// and the few are selected from exactly. Where the sample misled (too few above, or far too many, as when most values
// are equal), a radix select over all values finds the exact threshold first.
#include "codec/selection.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "codec/kernels.hpp"

namespace torch_iroh::codec {

namespace {

constexpr std::int32_t kNaN = 0x7f800001;  // of all NaNs

// Orders as the magnitude does.
std::int32_t magnitude(float value) {
  return std::min(static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(value) & 0x7fffffff), kNaN);
}

struct Guess {
  std::int32_t threshold;
  std::size_t room;  // for what is above it
};

// From lines of the cache that are evenly spaced. A threshold of 0 means that the sample is of no use.
Guess guess(std::span<const float> values, std::size_t kept) {
  constexpr std::size_t kLine = 16;
  const std::size_t lines = std::clamp<std::size_t>(values.size() / (16 * kLine), 1, 2048);
  if (values.size() < 4096) return {0, 0};
  std::vector<std::int32_t> sample;
  sample.reserve(lines * kLine);
  for (std::size_t line = 0; line < lines; ++line) {
    const std::size_t from = (values.size() - kLine) / lines * line;
    for (std::size_t i = 0; i < kLine; ++i) sample.push_back(magnitude(values[from + i]));
  }
  // How many of the sample are kept has about a Poisson distribution: four deviations lower, and a little for values
  // that resemble their neighbours.
  const double share = static_cast<double>(kept) / static_cast<double>(values.size());
  const double mean = share * static_cast<double>(sample.size());
  const double wanted = 1.05 * mean + 4 * std::sqrt(mean) + 4;
  if (wanted > 0.5 * static_cast<double>(sample.size())) return {0, 0};
  const auto rank = static_cast<std::size_t>(wanted);
  const auto at = sample.begin() + static_cast<std::ptrdiff_t>(rank);
  std::nth_element(sample.begin(), at, sample.end(), std::greater<>());
  const double above = wanted / static_cast<double>(sample.size()) * static_cast<double>(values.size());
  return {*at, std::min(static_cast<std::size_t>(2 * above) + 1024, values.size() + 64)};
}

// The exact `rank`-th largest magnitude (1: the largest) by its upper, middle and lower bits.
std::int32_t radix_select(std::span<const float> values, std::size_t rank) {
  constexpr std::array<int, 3> kShifts = {20, 10, 0};
  std::int32_t prefix = 0;
  int known = 31;  // bits from here on are known
  for (const int shift : kShifts) {
    std::vector<std::size_t> histogram(std::size_t{1} << (known - shift), 0);
    const auto mask = static_cast<std::int32_t>(histogram.size() - 1);
    for (const float value : values) {
      const std::int32_t key = magnitude(value);
      if (known == 31 || key >> known == prefix) ++histogram[static_cast<std::size_t>((key >> shift) & mask)];
    }
    std::size_t bucket = histogram.size() - 1;
    while (histogram[bucket] < rank) rank -= histogram[bucket--];
    prefix = (prefix << (known - shift)) | static_cast<std::int32_t>(bucket);
    known = shift;
  }
  return prefix;
}

// Of positions in order, all whose value is above `threshold` and the first that equal it.
template <class Positions>
std::vector<std::uint32_t> keep(std::span<const float> values, const Positions& positions, std::int32_t threshold,
                                std::size_t kept) {
  std::size_t equal = kept;
  positions([&](std::uint32_t position) { equal -= magnitude(values[position]) > threshold ? 1 : 0; });
  std::vector<std::uint32_t> found(kept + 1);  // each is written, and stepped past only if it is kept
  std::size_t size = 0;
  positions([&](std::uint32_t position) {
    const std::int32_t key = magnitude(values[position]);
    const bool taken_as_equal = (key == threshold) & (equal > 0);
    found[size] = position;
    size += ((key > threshold) | taken_as_equal) ? 1 : 0;
    equal -= taken_as_equal ? 1 : 0;
  });
  found.resize(kept);
  return found;
}

}  // namespace

std::vector<std::uint32_t> select_largest(std::span<const float> values, std::size_t kept) {
  const auto [threshold, room] = guess(values, kept);
  if (threshold > 0) {
    std::vector<std::uint32_t> found(room);
    const std::size_t size = kernels().find_large(values.data(), values.size(), threshold, found.data(), room);
    if (size >= kept && size <= room) {
      found.resize(size);
      std::vector<std::int32_t> keys(size);
      std::transform(found.begin(), found.end(), keys.begin(), [&](std::uint32_t at) { return magnitude(values[at]); });
      const auto last = keys.begin() + static_cast<std::ptrdiff_t>(kept - 1);
      std::nth_element(keys.begin(), last, keys.end(), std::greater<>());
      const auto each = [&](const auto& use) { std::for_each(found.begin(), found.end(), use); };
      return keep(values, each, *last, kept);
    }
  }
  const auto each = [&](const auto& use) {
    for (std::size_t i = 0; i < values.size(); ++i) use(static_cast<std::uint32_t>(i));
  };
  return keep(values, each, radix_select(values, kept), kept);
}

}  // namespace torch_iroh::codec
