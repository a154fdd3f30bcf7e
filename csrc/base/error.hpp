// One exception type for the core: what kind of failure, and a text for a person. Knows nothing of who throws it.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>

namespace torch_iroh {

enum class ErrorKind : std::uint8_t {
  invalid,    // the caller asked for something that has no meaning
  library,    // the iroh library is missing, of another version, or panicked
  network,    // iroh reported a failure; the text is iroh's own
  timeout,    // a deadline passed
  peer_gone,  // a rank left, died or went silent
  protocol,   // a peer sent bytes that this wire version does not allow
  mismatch,   // ranks called different operations
  aborted,    // this process gave up on purpose
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& text) : std::runtime_error(text), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

// A value or the error that took its place, for completions that must not throw.
template <typename T>
class Result {
 public:
  Result(T value) : held_(std::move(value)) {}
  Result(Error error) : held_(std::move(error)) {}
  bool ok() const { return held_.index() == 0; }
  T& value() {
    if (!ok()) throw std::get<1>(held_);
    return std::get<0>(held_);
  }
  const Error& error() const { return std::get<1>(held_); }

 private:
  std::variant<T, Error> held_;
};

struct Nothing {};

}  // namespace torch_iroh
