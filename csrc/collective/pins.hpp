// What a user fixes of the planner's choices: which algorithm, and which chunk, for which collective of which size.
//
//   pins   rule, rule, ...                   the first rule that holds decides; where none does, nothing is fixed
//   rule   COLLECTIVE [<= SIZE] = ALGORITHM [/ SIZE]
//   COLLECTIVE   all_reduce, broadcast, ..., or * for all of them
//   SIZE         a whole number of B, KiB, MiB or GiB (no unit: B); after <=: of the whole collective, as
//   torch_iroh.plan
//                counts it; after /: the chunk
//   ALGORITHM    ring, direct, ..., or auto: what nobody fixes
//
// "all_reduce<=64KiB=tree, all_reduce=ring/1MiB, *=auto". Spaces mean nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "collective/schedule.hpp"

namespace torch_iroh::collective {

inline constexpr std::size_t kMostPinBytes = 1000;  // of their text

struct Pin {
  std::optional<Algorithm> algorithm;  // none: auto
  std::size_t chunk_bytes = 0;         // 0: the group's
};

class Pins {
 public:
  Pins() = default;
  // Throws Error(invalid): which rule is wrong, and what is allowed there.
  static Pins parse(std::string_view text);
  static Pins everything(Algorithm algorithm);

  // `bytes` of the whole; none where the ranks do not know it alike (uneven all_to_all): then no rule with a size
  // holds.
  Pin find(Op op, std::optional<std::uint64_t> bytes) const;

  // Nothing is fixed, whatever the rules say about it.
  bool empty() const;
  bool names(Algorithm algorithm) const;  // in any rule
  // Equal texts are equal pins; "" when nothing is fixed.
  const std::string& text() const { return text_; }

 private:
  struct Rule {
    std::optional<Op> op;  // none: all
    std::optional<std::uint64_t> most;
    Pin pin;
  };

  static Rule rule_of(std::string_view text, std::size_t number);
  void add(const Rule& rule, std::size_t number);

  std::vector<Rule> rules_;
  std::string text_;
};

// The pin for `request`, whose own algorithm does not matter.
Pin pin_for(const Pins& pins, const Request& request, std::size_t element_bytes);

// The bytes of `request` as all ranks know them; none for an all_to_all that may be uneven.
std::optional<std::uint64_t> known_bytes(const Request& request, std::size_t element_bytes);

}  // namespace torch_iroh::collective
