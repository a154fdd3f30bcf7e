// The pair of binary trees that Algorithm::tree sends along; the picture is on top of tree.cpp.
#pragma once

#include <cstdint>
#include <vector>

namespace torch_iroh::collective {

struct TreeNode {
  std::int32_t parent = -1;  // none: the root
  std::vector<std::int32_t> children;
};

// The place of `rank` among `n` in tree 0 or 1.
TreeNode tree_node_of(std::int64_t rank, std::int32_t n, std::int32_t tree);

}  // namespace torch_iroh::collective
