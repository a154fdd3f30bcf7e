// The iroh shared library of this process: opened once, checked symbol by symbol, never closed (its threads live on).
#pragma once

#include <string>

namespace torch_iroh::iroh {

class Library {
 public:
  // Opens `path`; `installed_version` is only for error texts ("" when unknown). The environment variable
  // TORCH_IROH_LIBRARY overrides `path`. A second call with the same file is free; another file is an error.
  // Throws Error(library): not found, another contract version, a missing symbol or a changed checksum, a forked child.
  static void open(const std::string& path, const std::string& installed_version);

  static bool is_open() noexcept;

  // True in a process that was forked after the library was opened: nothing of it may be touched there.
  static bool inherited() noexcept;
};

}  // namespace torch_iroh::iroh
