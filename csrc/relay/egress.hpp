// What waits to be sent to one client: answers first, then datagrams, of which the oldest go when there are too many.
// That is what keeps a slow receiver's delay bounded; QUIC above us sends again what is missing. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "relay/websocket.hpp"

namespace torch_iroh::relay {

class Egress {
 public:
  struct Dropped {
    std::size_t frames = 0;
    std::size_t bytes = 0;
  };

  // Room for a whole frame of `bytes`, to be written before the next call; datagrams that had to go for it are counted
  // in `dropped`. A frame larger than `cap` pushes out all others.
  std::byte* push_datagram(std::size_t bytes, std::size_t cap, Dropped& dropped);
  // False: there are too many already, which means that the client does not read.
  bool push_answer(View frame);

  // How many bytes the next whole frames have: up to `limit`, but all answers, and at least one frame.
  std::size_t next_size(std::size_t limit) const;
  void take_into(std::byte* to, std::size_t size);  // as many as next_size said
  void drop_datagrams() { drop_front(queued(), sizes_.size() - first_); }

  bool empty() const { return answers_.empty() && queued() == 0; }
  std::size_t bytes() const { return answers_.size() + queued(); }

 private:
  std::size_t queued() const { return datagrams_.size() - head_; }
  void drop_front(std::size_t bytes, std::size_t frames);

  Bytes answers_;
  Bytes datagrams_;  // frames, one after the other, from head_ on
  std::size_t head_ = 0;
  std::vector<std::uint32_t> sizes_;  // of the frames, from first_ on
  std::size_t first_ = 0;
};

}  // namespace torch_iroh::relay
