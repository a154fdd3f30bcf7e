// One handle of the iroh library, freed once, left alone in a forked child. Private to csrc/iroh.
#pragma once

#include <utility>

#include "iroh/abi.hpp"

namespace torch_iroh::iroh {

template <abi::ObjectFunctions abi::Functions::* kObject>
class Handle {  // move-only
 public:
  Handle() = default;
  explicit Handle(abi::Handle handle) : handle_(handle) {}
  ~Handle() { reset(); }
  Handle(Handle&& other) noexcept : handle_(std::exchange(other.handle_, 0)) {}
  Handle& operator=(Handle&& other) noexcept {
    if (this != &other) {
      reset();
      handle_ = std::exchange(other.handle_, 0);
    }
    return *this;
  }

  // A clone, for a method to consume.
  abi::Handle lend() const {
    abi::CallStatus status;
    const abi::Handle clone = (abi::functions().*kObject).clone(handle_, &status);
    abi::check(status, "clone a handle");
    return clone;
  }
  abi::Handle release() { return std::exchange(handle_, 0); }

 private:
  void reset() {
    if (handle_ == 0) return;
    if (const abi::Functions* f = abi::functions_or_null()) {
      abi::CallStatus status;
      (f->*kObject).free(handle_, &status);
    }
    handle_ = 0;
  }

  abi::Handle handle_ = 0;
};

}  // namespace torch_iroh::iroh
