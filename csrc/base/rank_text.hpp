// Ranks in a sentence.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

namespace torch_iroh {

template <typename Number>
std::string numbers_text(const std::vector<Number>& numbers) {  // "1, 2, 5"
  std::string text;
  for (const Number number : numbers) text += (text.empty() ? "" : ", ") + std::to_string(number);
  return text;
}

inline std::string ranks_text(std::vector<int> ranks) {  // "rank 1", "ranks 1, 2", "ranks 1, ... and 8 more"
  constexpr std::size_t kMostListed = 16;
  const std::string noun = ranks.size() == 1 ? "rank " : "ranks ";
  const std::size_t unlisted = ranks.size() - std::min(ranks.size(), kMostListed);
  ranks.resize(ranks.size() - unlisted);
  return noun + numbers_text(ranks) + (unlisted == 0 ? "" : " and " + std::to_string(unlisted) + " more");
}

}  // namespace torch_iroh
