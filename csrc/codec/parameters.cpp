// The texts of codecs: read, checked and written.
#include "codec/parameters.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <locale>
#include <optional>
#include <sstream>
#include <vector>

#include "base/error.hpp"
#include "codec/kernels.hpp"

namespace torch_iroh::codec {

namespace {

constexpr std::array<std::string_view, 10> kNames = {"none", "bf16", "fp8",  "fp8-e5m2",  "int8",
                                                     "int4", "sign", "topk", "topk-int8", "topk-int4"};

[[noreturn]] void refuse(const std::string& text) {
  throw Error(ErrorKind::invalid, "codec: " + text);
}

std::string quoted(std::string_view text) {
  return "'" + std::string(text) + "'";
}

Kind kind_of(std::string_view name) {
  if (name == "fp8-e4m3") return Kind::fp8_e4m3;
  std::string known;
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == name) return static_cast<Kind>(i);
    known += (i == 0 ? "" : ", ") + std::string(kNames[i]);
  }
  refuse("unknown codec " + quoted(name) + "; known: " + known);
}

std::string parameters_of(Kind kind) {
  std::string text;
  if (takes_block(kind)) text += "block=16 to 4096, ";
  if (takes_scale(kind)) text += "scale=bf16 or fp32, ";
  if (is_sparse(kind)) text += "density=above 0 to 1, ";
  if (takes_rounding(kind)) text += "rounding=nearest or stochastic, ";
  return text + "nonfinite=keep or raise";
}

[[noreturn]] void refuse_parameter(Kind kind, std::string_view parameter) {
  refuse(std::string(name_of(kind)) + " has no parameter " + quoted(parameter) + "; it has: " + parameters_of(kind));
}

// In the "C" locale whatever the program's: neither strtod nor printf is.
std::optional<double> number_in(std::string_view text) {
  std::istringstream in{std::string(text)};
  in.imbue(std::locale::classic());
  double number;
  if (text.empty() || text.front() == ' ' || !(in >> number) || in.peek() != std::istringstream::traits_type::eof()) {
    return {};
  }
  return number;
}

bool is_block(double block) {
  return block >= kLeastBlock && block <= kMostBlock && std::has_single_bit(static_cast<std::uint32_t>(block)) &&
         std::floor(block) == block;
}
bool is_density(double density) {
  return density > 0 && density <= 1;
}

constexpr const char* kBlockRule = "a power of two from 16 to 4096";
constexpr const char* kDensityRule = "a number above 0 and at most 1";

// True for `yes`, false for `no`.
bool either(Kind kind, std::string_view key, std::string_view value, std::string_view no, std::string_view yes) {
  if (value != yes && value != no) {
    refuse(std::string(name_of(kind)) + ": " + std::string(key) + " is " + std::string(no) + " or " + std::string(yes) +
           ", not " + quoted(value));
  }
  return value == yes;
}

double number_of(Kind kind, std::string_view key, std::string_view value, bool (*fits)(double), const char* rule) {
  const std::optional<double> number = number_in(value);
  if (!number || !fits(*number)) {
    refuse(std::string(name_of(kind)) + ": " + std::string(key) + " is " + rule + ", not " + quoted(value));
  }
  return *number;
}

void set(Codec& codec, std::string_view key, std::string_view value) {
  const Kind kind = codec.kind;
  if (key == "block" && takes_block(kind)) {
    codec.block = static_cast<std::uint32_t>(number_of(kind, key, value, is_block, kBlockRule));
  } else if (key == "scale" && takes_scale(kind)) {
    codec.wide_scale = either(kind, key, value, "bf16", "fp32");
  } else if (key == "density" && is_sparse(kind)) {
    codec.density = number_of(kind, key, value, is_density, kDensityRule);
  } else if (key == "rounding" && takes_rounding(kind)) {
    codec.rounding = either(kind, key, value, "nearest", "stochastic") ? Rounding::stochastic : Rounding::nearest;
  } else if (key == "nonfinite") {
    codec.refuses_nonfinite = either(kind, key, value, "keep", "raise");
  } else {
    refuse_parameter(kind, key);
  }
}

}  // namespace

std::string_view name_of(Kind kind) {
  const auto index = static_cast<std::size_t>(kind);
  return index < kNames.size() ? kNames[index] : std::string_view();
}

bool is_sparse(Kind kind) {
  return kind == Kind::topk || kind == Kind::topk_int8 || kind == Kind::topk_int4;
}
bool takes_rounding(Kind kind) {
  return kind == Kind::int8 || kind == Kind::int4 || kind == Kind::topk_int8 || kind == Kind::topk_int4;
}
bool takes_scale(Kind kind) {
  return takes_rounding(kind) || kind == Kind::sign;
}
bool takes_block(Kind kind) {
  return takes_scale(kind) || kind == Kind::fp8_e4m3 || kind == Kind::fp8_e5m2;
}

void check(const Codec& codec) {
  const std::string name(name_of(codec.kind));
  if (name.empty()) refuse("unknown codec " + std::to_string(static_cast<int>(codec.kind)));
  if (takes_block(codec.kind) && !is_block(codec.block)) {
    refuse(name + ": block is " + kBlockRule + ", not " + std::to_string(codec.block));
  }
  if (is_sparse(codec.kind) && !is_density(codec.density)) {
    refuse(name + ": density is " + kDensityRule + ", not " + number_text(codec.density));
  }
}

std::string number_text(double number) {
  for (int digits = 1;; ++digits) {
    std::ostringstream out;
    out.imbue(std::locale::classic());
    out.precision(digits);
    out << number;
    if (digits == std::numeric_limits<double>::max_digits10 || number_in(out.str()) == number) return out.str();
  }
}

Codec parse(std::string_view text) {
  const std::size_t colon = text.find(':');
  Codec codec;
  codec.kind = kind_of(text.substr(0, colon));
  if (colon == std::string_view::npos) return codec;
  std::vector<std::string_view> seen;
  for (std::size_t at = colon + 1; at <= text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size());
    const std::string_view part = text.substr(at, end - at);
    const std::size_t equals = part.find('=');
    const std::string_view key = part.substr(0, equals);
    if (equals == std::string_view::npos) {
      refuse(quoted(part) + " in " + quoted(text) + " is no parameter=value; " + std::string(name_of(codec.kind)) +
             " has: " + parameters_of(codec.kind));
    }
    for (const std::string_view earlier : seen) {
      if (earlier == key) refuse("parameter " + quoted(key) + " is given twice in " + quoted(text));
    }
    seen.push_back(key);
    set(codec, key, part.substr(equals + 1));
    at = end + 1;
  }
  return codec;
}

std::string to_string(const Codec& codec) {
  check(codec);
  const Codec usual;
  std::string text(name_of(codec.kind));
  char before = ':';
  const auto say = [&](const std::string& part) {
    text += before + part;
    before = ',';
  };
  if (takes_block(codec.kind) && codec.block != usual.block) say("block=" + std::to_string(codec.block));
  if (takes_scale(codec.kind) && codec.wide_scale) say("scale=fp32");
  if (is_sparse(codec.kind) && codec.density != usual.density) say("density=" + number_text(codec.density));
  if (takes_rounding(codec.kind) && codec.rounding == Rounding::stochastic) say("rounding=stochastic");
  if (codec.refuses_nonfinite) say("nonfinite=raise");
  return text;
}

}  // namespace torch_iroh::codec
