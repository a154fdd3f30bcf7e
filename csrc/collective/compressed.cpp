#include "collective/compressed.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>

#include "base/error.hpp"
#include "collective/builder.hpp"
#include "collective/column_sum.hpp"
#include "collective/reduce.hpp"

namespace torch_iroh::collective {
namespace {

using Members = Hosts::Members;

bool is_float(DType dtype) {
  return dtype == DType::float16 || dtype == DType::bfloat16 || dtype == DType::float32 || dtype == DType::float64;
}

Members only(std::int32_t rank) {
  return std::make_shared<const Hosts::Ranks>(Hosts::Ranks{rank});
}

// Steps that all ranks number, of a rank that has no part in it.
CollectiveCall nothing(const std::string& title, std::int32_t rank) {
  CollectiveCall call;
  call.part_of = title;
  call.request.members = only(rank);
  return call;
}

CollectiveCall inside(const std::string& title, Op op, Members members, const Work& work) {
  CollectiveCall call;
  call.part_of = title;
  call.request.op = op;
  call.request.members = std::move(members);
  call.work = work;
  return call;
}

// Balanced ranges of `count` values for `owners`.
std::vector<Range> shards_of(std::uint64_t count, std::size_t owners) {
  std::vector<Range> ranges;
  for (std::size_t i = 0; i < owners; ++i) {
    ranges.push_back(shard_of(count, static_cast<std::int32_t>(owners), static_cast<std::int32_t>(i)));
  }
  return ranges;
}

std::vector<std::uint64_t> offsets_of(const std::vector<Range>& ranges, std::uint64_t base) {
  std::vector<std::uint64_t> offsets;
  for (const Range& range : ranges) offsets.push_back(base + range.offset);
  return offsets;
}

// Writes the result in its turn, which is no other rank's business.
CollectiveCall last(const std::string& title, std::int32_t rank, std::function<void()> write) {
  CollectiveCall call = nothing(title, rank);
  call.prepare = [write = std::move(write)](CollectiveCall&) { write(); };
  return call;
}

bool is_flat(const Hosts& sites) {
  return std::all_of(sites.all().begin(), sites.all().end(), [](const auto& site) { return site.size() == 1; });
}

std::vector<CollectiveCall> flat_all_reduce(const Compression& how, const Work& work, std::uint64_t count,
                                            std::int32_t world, std::int32_t rank) {
  auto sum = std::make_shared<ColumnSum>(how, work, how.sites.column(), rank, world);
  auto ranges = shards_of(count, how.sites.all().size());
  auto offsets = offsets_of(ranges, 0);
  sum->set_part(work.output, std::move(ranges), std::move(offsets));
  if (work.reduce == ReduceOp::premul_sum) sum->scale_by(work.premul);
  std::vector<CollectiveCall> parts;
  parts.push_back(sum->exchange());
  parts.push_back(sum->tell());
  parts.push_back(last(how.title, rank, [sum] { sum->store_sums(); }));
  return parts;
}

// What this rank owes for values that another of its site contributes to the other sites (since buffers were formed
// anew, or ranks were others) goes into the site's own sum. Values of a narrow type take what they can.
std::function<void(CollectiveCall&)> hand_over(const Compression& how, const Work& work, std::uint64_t count,
                                               Range own) {
  if (how.residual == nullptr) return {};
  return [residual = how.residual, dtype = work.dtype, output = work.output, count, own](CollectiveCall&) {
    constexpr std::uint64_t kPiece = 4096;
    std::array<float, kPiece> values;
    const auto add = [&](std::uint64_t from, std::uint64_t to) {
      for (; from < to; from += std::min(kPiece, to - from)) {
        const std::uint64_t size = std::min(kPiece, to - from);
        float* const owed = residual + from;
        if (std::all_of(owed, owed + size, [](float one) { return one == 0.0F; })) continue;
        std::byte* const at = output + from * size_of(dtype);
        widen(dtype, at, values.data(), size);
        for (std::uint64_t i = 0; i < size; ++i) owed[i] += values[i];
        narrow(dtype, owed, 1.0F, at, size);
        widen(dtype, at, values.data(), size);
        for (std::uint64_t i = 0; i < size; ++i) owed[i] = std::isfinite(values[i]) ? owed[i] - values[i] : 0.0F;
      }
    };
    add(0, own.offset);
    add(own.offset + own.count, count);
  };
}

std::vector<CollectiveCall> sharded_all_reduce(const Compression& how, const Work& work, std::uint64_t count,
                                               std::int32_t world, std::int32_t rank) {
  const Hosts& sites = how.sites;
  const auto mine = std::make_shared<const Hosts::Ranks>(sites.mine());
  std::vector<std::uint64_t> blocks;
  for (const Range& shard : shards_of(count, mine->size())) blocks.push_back(shard.count);
  const Range shard = shards_of(count, mine->size())[sites.index()];
  const std::shared_ptr<std::byte[]> part =
      std::make_unique_for_overwrite<std::byte[]>(shard.count * size_of(work.dtype));

  auto sum = std::make_shared<ColumnSum>(how, work, sites.column(), rank, world);
  auto ranges = shards_of(shard.count, sites.all().size());
  auto offsets = offsets_of(ranges, shard.offset);
  sum->set_part(part.get(), std::move(ranges), std::move(offsets));
  if (work.reduce == ReduceOp::avg) sum->scale_by(world);

  const auto keep = std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<std::byte[]>>>(work.keep, part);
  std::vector<CollectiveCall> parts(4);
  parts[0] = inside(how.title, Op::reduce_scatter, mine, work);
  parts[0].request.blocks = blocks;
  parts[0].work.input = work.output;
  parts[0].work.output = part.get();
  parts[0].prepare = hand_over(how, work, count, shard);
  parts[1] = sum->exchange();
  parts[2] = sum->tell();
  parts[3] = inside(how.title, Op::all_gather, mine, work);
  parts[3].request.blocks = blocks;
  parts[3].work.input = part.get();
  parts[3].prepare = [sum](CollectiveCall&) { sum->store_sums(); };
  parts[0].work.keep = parts[3].work.keep = keep;
  return parts;
}

std::vector<CollectiveCall> led_all_reduce(const Compression& how, const Work& work, std::uint64_t count,
                                           std::int32_t world, std::int32_t rank) {
  const Hosts& sites = how.sites;
  const auto mine = std::make_shared<const Hosts::Ranks>(sites.mine());
  const auto leaders = sites.leaders(sites.all().front().front());
  const std::int32_t leader = (*leaders)[sites.host()];
  std::vector<CollectiveCall> parts(4);
  parts[0] = inside(how.title, Op::reduce, mine, work);
  parts[0].work.input = work.output;
  parts[3] = inside(how.title, Op::broadcast, mine, work);
  for (const std::size_t one : {0, 3}) {
    parts[one].request.root = leader;
    parts[one].request.count = count;
  }
  parts[0].prepare = hand_over(how, work, count, rank == leader ? Range{0, count} : Range{});
  if (rank != leader) {
    parts[1] = nothing(how.title, rank);
    parts[2] = nothing(how.title, rank);
    return parts;
  }
  auto sum = std::make_shared<ColumnSum>(how, work, leaders, rank, world);
  auto ranges = shards_of(count, leaders->size());
  auto offsets = offsets_of(ranges, 0);
  sum->set_part(work.output, std::move(ranges), std::move(offsets));
  if (work.reduce == ReduceOp::avg) sum->scale_by(world);
  parts[1] = sum->exchange();
  parts[2] = sum->tell();
  parts[3].prepare = [sum](CollectiveCall&) { sum->store_sums(); };
  return parts;
}

std::int32_t rank_in(const Hosts& sites) {
  return sites.mine()[sites.index()];
}

}  // namespace

bool is_compressible(Op op, DType dtype, ReduceOp reduce) {
  if (!is_float(dtype)) return false;
  if (op == Op::all_gather) return true;
  if (op != Op::all_reduce && op != Op::reduce_scatter) return false;
  return reduce == ReduceOp::sum || reduce == ReduceOp::avg || reduce == ReduceOp::premul_sum;
}

bool is_worth_it(const codec::Codec& codec, const Hosts& sites, Op op, std::uint64_t count, DType dtype) {
  if (codec.kind == codec::Kind::none || sites.all().size() < 2) return false;
  const std::size_t ranks = sites.even() ? sites.all().size() * sites.mine().size() : sites.all().size();
  const std::uint64_t values = op == Op::all_reduce ? count / ranks : count;
  const bool fits = !codec::is_sparse(codec.kind) || values <= std::numeric_limits<std::uint32_t>::max();
  return values > 0 && fits && codec::frame_bytes(codec, values) < values * size_of(dtype);
}

std::vector<CollectiveCall> compressed_all_reduce(const Compression& how, const Work& work, std::uint64_t count,
                                                  std::int32_t world) {
  const std::int32_t rank = rank_in(how.sites);
  if (is_flat(how.sites)) return flat_all_reduce(how, work, count, world, rank);
  return how.sites.even() ? sharded_all_reduce(how, work, count, world, rank)
                          : led_all_reduce(how, work, count, world, rank);
}

std::vector<CollectiveCall> compressed_reduce_scatter(const Compression& how, const Work& work, std::uint64_t block,
                                                      std::int32_t world) {
  const Hosts& sites = how.sites;
  const std::int32_t rank = rank_in(sites);
  const std::size_t element = size_of(work.dtype);
  const bool by_sites = !is_flat(sites) && sites.even();
  Members column;
  std::vector<std::int32_t> all(static_cast<std::size_t>(world));
  for (std::int32_t i = 0; i < world; ++i) all[static_cast<std::size_t>(i)] = i;
  column = by_sites ? sites.column() : std::make_shared<const Hosts::Ranks>(all);
  auto sum = std::make_shared<ColumnSum>(how, work, column, rank, world);
  std::vector<Range> ranges;
  std::vector<std::uint64_t> residual_offsets;
  for (std::size_t member = 0; member < column->size(); ++member) {
    const auto place = by_sites ? member : static_cast<std::size_t>((*column)[member]);
    ranges.push_back({place * block, block});
    residual_offsets.push_back(static_cast<std::uint64_t>((*column)[member]) * block);
  }
  std::vector<CollectiveCall> parts;
  const auto finish = [&](std::shared_ptr<void> keep) {
    parts.push_back(sum->exchange());
    parts.push_back(
        last(how.title, rank, [sum, output = work.output, keep = std::move(keep)] { sum->store_own_sum(output); }));
  };
  if (!by_sites) {
    sum->set_part(const_cast<std::byte*>(work.input), std::move(ranges), std::move(residual_offsets));
    if (work.reduce == ReduceOp::premul_sum) sum->scale_by(work.premul);
    finish(nullptr);
    return parts;
  }
  // By columns: one range for each rank of this site, in it the blocks of the ranks of all sites with its index.
  const auto mine = std::make_shared<const Hosts::Ranks>(sites.mine());
  const std::uint64_t width = block * column->size();
  struct Memory {
    std::shared_ptr<void> keep;
    std::unique_ptr<std::byte[]> packed, part;
  };
  auto memory = std::make_shared<Memory>();
  memory->keep = work.keep;
  memory->part = std::make_unique_for_overwrite<std::byte[]>(width * element);
  sum->set_part(memory->part.get(), std::move(ranges), std::move(residual_offsets));
  if (work.reduce == ReduceOp::avg) sum->scale_by(world);
  CollectiveCall first = inside(how.title, Op::reduce_scatter, mine, work);
  first.request.blocks.assign(mine->size(), width);
  first.work.output = memory->part.get();
  first.work.keep = memory;
  first.prepare = [memory, sites, block, element, width, input = work.input](CollectiveCall& ready) {
    memory->packed = std::make_unique_for_overwrite<std::byte[]>(width * sites.mine().size() * element);
    std::byte* to = memory->packed.get();
    for (std::size_t index = 0; index < sites.mine().size(); ++index) {
      for (const auto& site : sites.all()) {
        std::memcpy(to, input + static_cast<std::uint64_t>(site[index]) * block * element, block * element);
        to += block * element;
      }
    }
    ready.work.input = memory->packed.get();
  };
  parts.push_back(std::move(first));
  finish(memory);
  return parts;
}

std::vector<CollectiveCall> compressed_all_gather(const Compression& how, const Work& work, std::uint64_t block,
                                                  std::int32_t world) {
  struct Gathered {
    std::shared_ptr<void> keep;
    std::unique_ptr<std::byte[]> own;
    Frames frames;
  };
  auto gathered = std::make_shared<Gathered>();
  gathered->keep = work.keep;
  const std::size_t size = codec::frame_bytes(how.codec, block);
  for (std::int32_t i = 0; i < world; ++i) gathered->frames.add(size);
  CollectiveCall part;
  part.part_of = how.title;
  part.request.op = Op::all_gather;
  part.request.blocks = gathered->frames.sizes;
  part.work.keep = gathered;
  part.prepare = [gathered, codec = how.codec, seed = how.seed, dtype = work.dtype, input = work.input, block, size,
                  rank = rank_in(how.sites)](CollectiveCall& ready) {
    const auto values = std::make_unique_for_overwrite<float[]>(block);
    widen(dtype, input, values.get(), block);
    gathered->own = std::make_unique_for_overwrite<std::byte[]>(size);
    gathered->frames.allocate();
    try {
      codec::encode(codec, {values.get(), block}, seed, {gathered->own.get(), size});
    } catch (const Error& error) {
      throw Error(error.kind(), unsendable(rank, error.what()));
    }
    ready.work.input = gathered->own.get();
    ready.work.output = gathered->frames.bytes.get();
  };
  const auto write = [gathered, codec = how.codec, dtype = work.dtype, output = work.output, block, world] {
    const auto values = std::make_unique_for_overwrite<float[]>(block);
    for (std::int32_t rank = 0; rank < world; ++rank) {
      const auto index = static_cast<std::size_t>(rank);
      try {
        codec::decode(codec, gathered->frames.of(index), {values.get(), block});
      } catch (const Error& error) {
        throw Error(error.kind(), unreadable(rank, codec, error.what()));
      }
      narrow(dtype, values.get(), 1.0F, output + index * block * size_of(dtype), block);
    }
  };
  std::vector<CollectiveCall> parts;
  parts.push_back(std::move(part));
  parts.push_back(last(how.title, rank_in(how.sites), write));
  return parts;
}

}  // namespace torch_iroh::collective
