// What one rank does of a sum among the ranks of a column, one of each site: each owns a range, adds up what the others
// contribute to it in frames of a codec, and, for an all_reduce, tells the sum.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "collective/compressed.hpp"

namespace torch_iroh::collective {

// Frames of several ranks in one buffer, in the order of members.
struct Frames {
  std::vector<std::uint64_t> sizes;
  std::vector<std::uint64_t> offsets;
  std::unique_ptr<std::byte[]> bytes;

  void add(std::uint64_t size) {
    offsets.push_back(total());
    sizes.push_back(size);
  }
  std::uint64_t total() const { return sizes.empty() ? 0 : offsets.back() + sizes.back(); }
  void allocate() { bytes = std::make_unique_for_overwrite<std::byte[]>(total()); }
  std::span<std::byte> of(std::size_t index) const { return {bytes.get() + offsets[index], sizes[index]}; }
};

// Whose frame could not be read, and why.
std::string unreadable(std::int32_t rank, const codec::Codec& codec, const std::string& why);
std::string unsendable(std::int32_t rank, const std::string& why);

class ColumnSum : public std::enable_shared_from_this<ColumnSum> {
 public:
  ColumnSum(const Compression& how, const Work& work, Hosts::Members column, std::int32_t rank, std::int32_t world);

  // The values, when they are ready, and where those of each member are among them and among the residuals.
  void set_part(std::byte* part, std::vector<Range> ranges, std::vector<std::uint64_t> residual_offsets);
  void scale_by(double factor) { factor_ = static_cast<float>(factor); }

  CollectiveCall exchange();
  CollectiveCall tell();
  void store_own_sum(std::byte* to);  // after exchange(): this rank's range, in its own dtype
  void store_sums();                  // after tell(): all of the part

 private:
  std::byte* at(const Range& range) const { return part_ + range.offset * element_; }
  float* residual_of(std::size_t member) const {
    return residual_ == nullptr ? nullptr : residual_ + residual_offsets_[member];
  }
  std::uint64_t longest_range() const;
  CollectiveCall of_frames(Op op);
  void load(std::size_t member, float* values) const;
  void encode_contributions();
  void add_up();
  void encode_sum();

  const codec::Codec codec_;
  const std::uint64_t seed_;
  float* const residual_;
  const std::string title_;
  const DType dtype_;
  const std::size_t element_;
  const float divisor_;
  const std::shared_ptr<void> keep_;
  const Hosts::Members column_;
  const std::int32_t rank_;
  const std::size_t me_;  // among the column
  float factor_ = 1.0F;
  std::byte* part_ = nullptr;
  std::vector<Range> ranges_;
  std::vector<std::uint64_t> residual_offsets_;
  Frames out_, in_, sums_;
  std::unique_ptr<std::byte[]> own_;  // the frame of this rank's sum
  std::unique_ptr<float[]> sum_;
};

}  // namespace torch_iroh::collective
