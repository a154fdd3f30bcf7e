// The words in which a group says what went wrong, the same wherever it is found.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/rank_text.hpp"
#include "base/time.hpp"

namespace torch_iroh::collective {

// Gloo begins so, and programs look for it.
inline std::string timed_out(Duration limit, int rank) {
  return "Timed out waiting " + whole_milliseconds(limit) + "ms on rank " + std::to_string(rank);
}

inline std::string still_waiting_for(const std::vector<int>& waiting, const std::vector<int>& silent) {
  if (waiting.empty()) return "";
  std::string text = "; still waiting for " + ranks_text(waiting);
  if (!silent.empty()) text += " (" + ranks_text(silent) + " never began this operation)";
  return text;
}

// "all_reduce #3(sum, ...)"
inline std::string title_of(std::uint64_t sequence, const std::string& description) {
  const auto name = description.substr(0, description.find('('));
  return name + " #" + std::to_string(sequence) + description.substr(name.size());
}

inline Error explain(const Error& cause, int rank, const std::string& what) {
  // News of a time-out elsewhere may begin with this very operation.
  const std::string text = cause.what();
  return {cause.kind(), "rank " + std::to_string(rank) + ": " + (text.starts_with(what) ? "" : what + ": ") + text};
}

}  // namespace torch_iroh::collective
