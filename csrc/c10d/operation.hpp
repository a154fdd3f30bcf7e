// One call of torch in the making: what its Work will show, and the collectives of the core that it consists of.
#pragma once

#include <functional>
#include <vector>

#include "c10d/tensors.hpp"
#include "c10d/work.hpp"
#include "collective/group.hpp"

namespace torch_iroh::c10d_backend {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<std::vector<at::Tensor>>;

class Operation {
 public:
  // `op` is the name in error texts, `title` the one in traces.
  Operation(const char* op, int rank, int world, ::c10d::OpType type, const char* title, Tensors inputs,
            Tensors outputs);

  struct Part {  // one collective of the core
    collective::CollectiveCall call;
    std::function<void()> after;  // once it is done everywhere and before torch sees the result
  };

  // Each adds one collective. all_reduce, broadcast and reduce work in place on `tensor`.
  Part& add_reduce(collective::Op kind, const at::Tensor& tensor, const ::c10d::ReduceOp& reduce, int root);
  Part& add_gather(collective::Op kind, const Tensors& outputs, const Tensors& inputs, int root);
  Part& add_reduce_scatter(const at::Tensor& output, const Tensors& inputs, const ::c10d::ReduceOp& reduce);
  Part& add_barrier();
  // A sum of sparse COO tensors, in place (sparse.cpp).
  void add_sparse_all_reduce(const at::Tensor& tensor, const ::c10d::ReduceOp& reduce);

  // Views of `whole`: one per rank, `block` large each; by `splits` of dimension 0, where an empty list means even.
  Tensors split_evenly(const char* what, const at::Tensor& whole, const at::Tensor& block) const;
  Tensors split_by(const at::Tensor& whole, const std::vector<std::int64_t>& splits) const;

  // The future's value is a list of lists.
  void give_lists(const TensorLists& lists);

  const char* const op;
  IrohWork::Description description;
  std::vector<Part> parts;

 private:
  Part& add(collective::Op kind, int root, DType dtype);
  void set_reduction(Part& part, const ::c10d::ReduceOp& reduce) const;
  template <typename Flats>
  void lend(Part& part, const std::shared_ptr<Flats>& flats, const std::byte* input, const FlatOutput& output) const;

  const int rank_;
  const int world_;
};

}  // namespace torch_iroh::c10d_backend
