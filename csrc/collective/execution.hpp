// Runs one rank's schedule: cuts steps into chunks, starts each chunk when what it depends on is done, reduces what
// arrives. Event-driven and single-threaded: its group calls it from one strand. Owns no thread and no socket.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/dtype.hpp"
#include "base/payload.hpp"
#include "collective/schedule.hpp"
#include "transport/transport.hpp"

namespace torch_iroh::collective {

// The memory and arithmetic of one collective.
struct Work {
  DType dtype = DType::uint8;
  ReduceOp reduce = ReduceOp::sum;
  double premul = 1.0;  // premul_sum only: this rank's factor
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  std::shared_ptr<void> keep;  // alive as long as a peer may still be reading from the buffers
};

// Elements of the input where an operation has one.
std::uint64_t input_elements(const Request& request);

class Execution : public std::enable_shared_from_this<Execution> {
 public:
  // Sends one chunk; `sent` is called on the group's strand when the memory is free again.
  using Send = std::function<void(int peer, const transport::Tag& tag, std::span<const std::byte> bytes,
                                  std::function<void()> sent)>;

  Execution(const Request& request, const Work& work, std::size_t chunk_bytes, std::uint64_t sequence,
            std::uint32_t signature, Send send);

  void start();
  // Throws Error(mismatch) when the chunk is not one that this schedule receives, or has another length.
  void on_data(int from, const transport::Tag& tag, Payload payload);

  // Nothing is read or written any more, whatever still arrives; chunks that wait give their senders' memory back.
  void abandon();
  bool finished() const { return steps_left_ == 0; }
  bool waits_for(int rank) const;
  bool sends_to(int rank) const;
  std::vector<int> waiting_for() const;
  const std::vector<int>& peers() const { return peers_; }

 private:
  struct Chunk {
    std::uint32_t waits = 0;  // dependencies by chunk that are not done
    bool arrived = false;     // receives: its payload is here
    bool begun = false;
    Payload payload;
  };
  struct Wide {            // a receive that adds to a float32 sum instead of its 16-bit range
    float* sum = nullptr;  // none: it does not
    bool first = false;    // begins the sum from its local operand
    float divisor = 0;     // not 0: the last, which divides, rounds and stores
  };
  struct StepState {
    std::uint32_t waits = 0;        // whole-step dependencies that are not done
    std::uint32_t chunks_left = 0;  // not done
    std::vector<Chunk> chunks;
    std::vector<std::pair<std::uint32_t, bool>> dependents;  // (step, by chunk)
    Wide wide;
  };
  struct Piece {
    std::uint32_t step;
    std::uint32_t chunk;
  };

  std::uint64_t count_of(const Step& step) const;
  std::byte* at(const Slice& slice, std::uint64_t element) const;
  void consider(std::uint32_t step, std::uint32_t chunk);  // queues the chunk when nothing holds it back
  void keep_sums_wide();
  void reduce_chunk(const Piece& piece, const Payload& payload, std::uint64_t offset, std::uint64_t count);
  void run_ready();
  void perform(const Piece& piece);
  void complete(const Piece& piece);

  const Work work_;
  const std::size_t element_;
  const std::uint64_t chunk_count_;  // elements
  const std::int32_t world_;
  const std::uint64_t sequence_;
  const std::uint32_t signature_;
  const Send send_;
  Schedule schedule_;
  std::vector<StepState> states_;
  std::vector<std::vector<std::uint32_t>> receives_;  // by rank: the receiving step of each message
  std::vector<int> peers_;
  std::unique_ptr<std::byte[]> scratch_;
  std::unique_ptr<std::byte[]> scaled_input_;
  std::vector<std::unique_ptr<float[]>> sums_;
  std::vector<bool> absorbed_;  // finish steps whose division a wide sum has done
  std::deque<Piece> ready_;
  std::size_t steps_left_ = 0;
  bool abandoned_ = false;
};

}  // namespace torch_iroh::collective
