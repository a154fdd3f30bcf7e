#include "relay/egress.hpp"

#include <algorithm>

namespace torch_iroh::relay {
namespace {

constexpr std::size_t kMostAnswerBytes = 64 * 1024;
constexpr std::size_t kFirstReserve = 64 * 1024;

}  // namespace

std::byte* Egress::push_datagram(std::size_t bytes, std::size_t cap, Dropped& dropped) {
  std::size_t gone = 0;
  std::size_t frames = 0;
  while (queued() - gone > 0 && queued() - gone + bytes > cap) gone += sizes_[first_ + frames++];
  dropped.frames += frames;
  dropped.bytes += gone;
  drop_front(gone, frames);
  if (datagrams_.capacity() == 0) datagrams_.reserve(kFirstReserve);
  const std::size_t end = datagrams_.size();
  datagrams_.resize(end + bytes);
  sizes_.push_back(static_cast<std::uint32_t>(bytes));
  return datagrams_.data() + end;
}

bool Egress::push_answer(View frame) {
  if (answers_.size() + frame.size() > kMostAnswerBytes) return false;
  answers_.insert(answers_.end(), frame.begin(), frame.end());
  return true;
}

std::size_t Egress::next_size(std::size_t limit) const {
  std::size_t size = answers_.size();
  for (std::size_t i = first_; i < sizes_.size() && (size == 0 || size + sizes_[i] <= limit); ++i) size += sizes_[i];
  return size;
}

void Egress::take_into(std::byte* to, std::size_t size) {
  std::copy(answers_.begin(), answers_.end(), to);
  const std::size_t bytes = size - answers_.size();
  std::copy_n(datagrams_.begin() + static_cast<std::ptrdiff_t>(head_), bytes, to + answers_.size());
  answers_ = {};
  std::size_t frames = 0;
  for (std::size_t left = bytes; left > 0; ++frames) left -= sizes_[first_ + frames];
  drop_front(bytes, frames);
}

void Egress::drop_front(std::size_t bytes, std::size_t frames) {
  head_ += bytes;
  first_ += frames;
  if (head_ == datagrams_.size()) {
    // Memory goes back: thousands of clients are silent most of the time.
    datagrams_ = {};
    sizes_ = {};
    head_ = first_ = 0;
  } else if (head_ > datagrams_.size() / 2) {
    datagrams_.erase(datagrams_.begin(), datagrams_.begin() + static_cast<std::ptrdiff_t>(head_));
    sizes_.erase(sizes_.begin(), sizes_.begin() + static_cast<std::ptrdiff_t>(first_));
    head_ = first_ = 0;
  }
}

}  // namespace torch_iroh::relay
