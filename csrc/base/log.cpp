#include "base/log.hpp"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

namespace torch_iroh {
namespace {

constexpr std::size_t kMostKeys = 1000;

LogLevel level_from_environment() {
  const char* text = std::getenv("TORCH_IROH_LOG");
  if (text == nullptr) return LogLevel::warn;
  if (std::strcmp(text, "error") == 0) return LogLevel::error;
  if (std::strcmp(text, "info") == 0) return LogLevel::info;
  if (std::strcmp(text, "debug") == 0) return LogLevel::debug;
  return LogLevel::warn;
}

}  // namespace

bool log_enabled(LogLevel level) {
  static const LogLevel chosen = level_from_environment();
  return level <= chosen;
}

void log(LogLevel level, const std::string& text) {
  if (!log_enabled(level)) return;
  static constexpr const char* kNames[] = {"error", "warning", "info", "debug"};
  // One call per line, so that the lines of several ranks do not mix.
  std::fprintf(stderr, "torch-iroh[%d] %s: %s\n", static_cast<int>(getpid()), kNames[static_cast<int>(level)],
               text.c_str());
}

void log_once(LogLevel level, const std::string& key, const std::string& text) {
  static auto* mutex = new std::mutex;
  static auto* seen = new std::set<std::string>;
  {
    const std::lock_guard lock(*mutex);
    if (seen->size() >= kMostKeys || !seen->insert(key).second) return;
  }
  log(level, text);
}

}  // namespace torch_iroh
