#include "collective/column_sum.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.hpp"
#include "collective/reduce.hpp"

namespace torch_iroh::collective {
namespace {

// The sum of contributions has entries where any of them has: a sparse one is given twice the room, and is sent as
// dense as its values are where that takes no more.
codec::Codec codec_of_sums(const codec::Codec& given, std::uint64_t count) {
  if (!codec::is_sparse(given.kind)) return given;
  codec::Codec sparse = given;
  sparse.density = std::min(1.0, 2 * given.density);
  codec::Codec dense = given;
  dense.kind = given.kind == codec::Kind::topk        ? codec::Kind::none
               : given.kind == codec::Kind::topk_int8 ? codec::Kind::int8
                                                      : codec::Kind::int4;
  return codec::frame_bytes(dense, count) <= codec::frame_bytes(sparse, count) ? dense : sparse;
}

std::uint64_t mixed(std::uint64_t seed, std::uint64_t with) {  // splitmix64
  std::uint64_t z = seed + 0x9e3779b97f4a7c15 * (with + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

// What is left of a value that is not finite is nothing: it would stay for ever.
void subtract(const float* values, const float* sent, float* left, std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) {
    const float difference = values[i] - sent[i];
    left[i] = std::isfinite(difference) ? difference : 0.0F;
  }
}

template <typename Step>
void sending(std::int32_t rank, const Step& step) {
  try {
    step();
  } catch (const Error& error) {
    throw Error(error.kind(), unsendable(rank, error.what()));
  }
}

template <typename Step>
void reading(std::int32_t from, const codec::Codec& codec, const Step& step) {
  try {
    step();
  } catch (const Error& error) {
    throw Error(error.kind(), unreadable(from, codec, error.what()));
  }
}

}  // namespace

std::string unreadable(std::int32_t rank, const codec::Codec& codec, const std::string& why) {
  return "what rank " + std::to_string(rank) + " sent, compressed by " + codec::to_string(codec) +
         ", cannot be read: " + why + ". Try: the same version of torch-iroh on all ranks";
}

std::string unsendable(std::int32_t rank, const std::string& why) {
  return "rank " + std::to_string(rank) + " cannot send it: " + why;
}

ColumnSum::ColumnSum(const Compression& how, const Work& work, Hosts::Members column, std::int32_t rank,
                     std::int32_t world)
    : codec_(how.codec),
      seed_(how.seed),
      residual_(how.residual),
      title_(how.title),
      dtype_(work.dtype),
      element_(size_of(work.dtype)),
      divisor_(work.reduce == ReduceOp::avg ? static_cast<float>(world) : 1.0F),
      keep_(work.keep),
      column_(std::move(column)),
      rank_(rank),
      me_(static_cast<std::size_t>(std::find(column_->begin(), column_->end(), rank) - column_->begin())) {}

void ColumnSum::set_part(std::byte* part, std::vector<Range> ranges, std::vector<std::uint64_t> residual_offsets) {
  part_ = part;
  ranges_ = std::move(ranges);
  residual_offsets_ = std::move(residual_offsets);
}

std::uint64_t ColumnSum::longest_range() const {
  std::uint64_t longest = 0;
  for (const Range& range : ranges_) longest = std::max(longest, range.count);
  return longest;
}

CollectiveCall ColumnSum::of_frames(Op op) {
  CollectiveCall call;
  call.part_of = title_;
  call.request.op = op;
  call.request.members = column_;
  call.work.keep = shared_from_this();
  return call;
}

CollectiveCall ColumnSum::exchange() {
  for (std::size_t member = 0; member < column_->size(); ++member) {
    const bool mine = member == me_;
    out_.add(mine ? 0 : codec::frame_bytes(codec_, ranges_[member].count));
    in_.add(mine ? 0 : codec::frame_bytes(codec_, ranges_[me_].count));
  }
  CollectiveCall call = of_frames(Op::all_to_all);
  call.request.send_blocks = out_.sizes;
  call.request.blocks = in_.sizes;
  call.prepare = [self = shared_from_this()](CollectiveCall& ready) {
    self->encode_contributions();
    ready.work.input = self->out_.bytes.get();
    ready.work.output = self->in_.bytes.get();
  };
  return call;
}

CollectiveCall ColumnSum::tell() {
  for (const Range& range : ranges_) sums_.add(codec::frame_bytes(codec_of_sums(codec_, range.count), range.count));
  CollectiveCall call = of_frames(Op::all_gather);
  call.request.blocks = sums_.sizes;
  call.prepare = [self = shared_from_this()](CollectiveCall& ready) {
    self->add_up();
    self->encode_sum();
    ready.work.input = self->own_.get();
    ready.work.output = self->sums_.bytes.get();
  };
  return call;
}

void ColumnSum::store_own_sum(std::byte* to) {
  add_up();
  narrow(dtype_, sum_.get(), divisor_, to, ranges_[me_].count);
  sum_.reset();
}

void ColumnSum::store_sums() {
  const std::uint64_t longest = longest_range();
  const auto values = std::make_unique_for_overwrite<float[]>(longest);
  for (std::size_t member = 0; member < ranges_.size(); ++member) {
    const Range& range = ranges_[member];
    const codec::Codec codec = codec_of_sums(codec_, range.count);
    reading((*column_)[member], codec_, [&] { codec::decode(codec, sums_.of(member), {values.get(), range.count}); });
    narrow(dtype_, values.get(), divisor_, at(range), range.count);
  }
  sums_.bytes.reset();
}

void ColumnSum::load(std::size_t member, float* values) const {
  const Range& range = ranges_[member];
  widen(dtype_, at(range), values, range.count);
  if (factor_ != 1.0F) {
    for (std::uint64_t i = 0; i < range.count; ++i) values[i] *= factor_;
  }
  if (const float* residual = residual_of(member)) {
    for (std::uint64_t i = 0; i < range.count; ++i) values[i] += residual[i];
  }
}

void ColumnSum::encode_contributions() {
  out_.allocate();
  in_.allocate();
  const std::uint64_t longest = longest_range();
  const auto values = std::make_unique_for_overwrite<float[]>(longest);
  const auto sent = residual_ == nullptr ? nullptr : std::make_unique_for_overwrite<float[]>(longest);
  for (std::size_t member = 0; member < ranges_.size(); ++member) {
    if (member == me_) continue;
    const std::uint64_t count = ranges_[member].count;
    load(member, values.get());
    sending(rank_,
            [&] { codec::encode(codec_, {values.get(), count}, mixed(seed_, member), out_.of(member), sent.get()); });
    if (float* residual = residual_of(member)) subtract(values.get(), sent.get(), residual, count);
  }
}

void ColumnSum::add_up() {
  out_.bytes.reset();
  sum_ = std::make_unique_for_overwrite<float[]>(ranges_[me_].count);
  load(me_, sum_.get());
  for (std::size_t member = 0; member < ranges_.size(); ++member) {
    if (member == me_) continue;
    reading((*column_)[member], codec_, [&] { codec::add(codec_, in_.of(member), {sum_.get(), ranges_[me_].count}); });
  }
  in_.bytes.reset();
  if (float* residual = residual_of(me_)) std::fill_n(residual, ranges_[me_].count, 0.0F);
}

void ColumnSum::encode_sum() {
  const std::uint64_t count = ranges_[me_].count;
  const codec::Codec codec = codec_of_sums(codec_, count);
  own_ = std::make_unique_for_overwrite<std::byte[]>(sums_.sizes[me_]);
  sums_.allocate();
  float* const residual = residual_of(me_);
  sending(rank_, [&] {
    codec::encode(codec, {sum_.get(), count}, mixed(seed_, column_->size()), {own_.get(), sums_.sizes[me_]}, residual);
  });
  if (residual != nullptr) {
    // What a narrow type makes of it is all that anyone gets.
    const auto stored = std::make_unique_for_overwrite<std::byte[]>(count * element_);
    narrow(dtype_, residual, divisor_, stored.get(), count);
    widen(dtype_, stored.get(), residual, count);
    for (std::uint64_t i = 0; i < count; ++i) residual[i] *= divisor_;
    subtract(sum_.get(), residual, residual, count);
  }
  sum_.reset();
}

}  // namespace torch_iroh::collective
