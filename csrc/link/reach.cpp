#include "link/reach.hpp"

#include <algorithm>
#include <utility>

#include "base/bytes.hpp"
#include "base/log.hpp"

namespace torch_iroh::link {
namespace {

constexpr Duration kRedialPause = milliseconds(2000);
constexpr std::uint32_t kMostAddressBytes = 64;
constexpr std::size_t kMostServers = 16;

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  while (begin <= text.size()) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    std::string part = text.substr(begin, end - begin);
    const std::size_t first = part.find_first_not_of(" \t");
    if (first != std::string::npos) {
      part = part.substr(first, part.find_last_not_of(" \t") - first + 1);
      parts.push_back(std::move(part));
    }
    begin = end + 1;
  }
  return parts;
}

bool is_relay_url(const std::string& text) {
  for (const std::string scheme : {"http://", "https://"}) {
    if (text.starts_with(scheme) && text.size() > scheme.size()) {
      return printable(text) == text && text.find_first_of(" \"<>\\^`{}|") == std::string::npos;
    }
  }
  return false;
}

iroh::EndpointAddr to_addr(const std::string& observer) {
  iroh::EndpointAddr addr;
  const std::size_t at = observer.find('@');
  const auto id = at == std::string::npos ? std::nullopt : iroh::id_from_hex(observer.substr(0, at));
  if (!id || !iroh::is_socket_address(observer.substr(at + 1))) {
    throw Error(ErrorKind::invalid, "torch-iroh option observer is '" + printable(observer) +
                                        "'; allowed: what `torch-iroh relay` prints, \"<64 hex digits>@ip:port\"");
  }
  addr.id = *id;
  addr.direct = {observer.substr(at + 1)};
  return addr;
}

}  // namespace

void parse_relays(const std::string& text, const std::optional<std::string>& token, ReachOptions& into) {
  into.relays.clear();
  into.public_relays = text == "n0";
  if (text == "n0" || text == "none" || text.empty()) return;
  for (std::string& url : split(text)) {
    if (!is_relay_url(url)) {
      throw Error(ErrorKind::invalid, "torch-iroh option relay is '" + printable(text) +
                                          "'; allowed: relay URLs (http://... or https://...) separated by commas, "
                                          "'n0' (iroh's public relays), 'none'");
    }
    into.relays.push_back({std::move(url), token});
  }
  if (into.relays.size() > kMostServers) throw Error(ErrorKind::invalid, "torch-iroh option relay: at most 16 URLs");
}

std::vector<std::string> parse_observers(const std::string& text) {
  std::vector<std::string> observers = split(text);
  for (const std::string& one : observers) to_addr(one);
  if (observers.size() > kMostServers) throw Error(ErrorKind::invalid, "torch-iroh option observer: at most 16");
  return observers;
}

Reach::~Reach() {
  for (const Observer& observer : observers_) {
    if (observer.connection) observer.connection.close(0, "left");
  }
}

void Reach::start(TimePoint by) {
  const bool relayed = options_.public_relays || !options_.relays.empty();
  if (relayed) {
    endpoint_.online().then([weak = weak_from_this()](const Result<Nothing>& result) {
      const auto self = weak.lock();
      if (!self || !result.ok()) return;
      const std::lock_guard lock(self->mutex_);
      self->online_ = true;
      self->changed_.notify_all();
    });
  }
  {
    const std::lock_guard lock(mutex_);
    for (const std::string& one : options_.observers) observers_.emplace_back().addr = to_addr(one);
  }
  for (std::size_t i = 0; i < options_.observers.size(); ++i) dial(i);

  std::unique_lock lock(mutex_);
  const auto answered = [&] {
    return observers_.empty() || std::any_of(observers_.begin(), observers_.end(),
                                             [](const Observer& observer) { return !observer.seen.empty(); });
  };
  changed_.wait_until(lock, by, [&] { return (online_ || !relayed) && answered(); });
  const bool no_relay = relayed && !online_;
  const bool no_answer = !answered();
  lock.unlock();
  if (no_relay) {
    log_once(LogLevel::warn, "no relay",
             "no relay could be reached yet (" +
                 (options_.public_relays ? std::string("iroh's public relays") : options_.relays.front().url) +
                 "): peers must reach this process directly. Is the URL right, the relay up, its token the one given?");
  }
  if (no_answer) {
    log_once(LogLevel::warn, "no observer",
             "no observer has answered yet (" + options_.observers.front() +
                 "): behind a NAT, peers reach this process only through a relay. Is UDP blocked here?");
  }
}

void Reach::on_tick(TimePoint now) {
  std::vector<std::size_t> due;
  {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < observers_.size(); ++i) {
      if (!observers_[i].connection && !observers_[i].dialing && now >= observers_[i].retry_at) due.push_back(i);
    }
  }
  for (const std::size_t index : due) dial(index);
}

void Reach::dial(std::size_t index) {
  iroh::EndpointAddr addr;
  {
    const std::lock_guard lock(mutex_);
    observers_[index].dialing = true;
    addr = observers_[index].addr;
  }
  auto on_result = [weak = weak_from_this(), index](Result<iroh::Connection> result) {
    const auto self = weak.lock();
    if (!self) return;
    if (!result.ok()) return self->on_lost(index, result.error().what());
    const iroh::Connection& connection = result.value();
    {
      const std::lock_guard lock(self->mutex_);
      self->observers_[index].dialing = false;
      self->observers_[index].connection = connection;
    }
    connection.closed().then([weak, index](Result<std::string> reason) {
      if (const auto still = weak.lock()) still->on_lost(index, reason.ok() ? reason.value() : reason.error().what());
    });
    self->listen(index, connection);
  };
  try {
    endpoint_.connect(addr, kObserveAlpn).then(on_result);
  } catch (const Error& error) {
    on_result(error);
  }
}

void Reach::listen(std::size_t index, const iroh::Connection& connection) {
  connection.accept_uni().then([weak = weak_from_this(), index, connection](Result<iroh::RecvStream> result) {
    if (!result.ok()) return;  // the connection has ended, which is reported elsewhere
    auto stream = std::make_shared<iroh::RecvStream>(std::move(result.value()));
    stream->read(kMostAddressBytes).then([weak, index, connection, stream](Result<Payload> text) {
      const auto self = weak.lock();
      if (!self) return;
      if (text.ok()) {
        const auto bytes = text.value().bytes();
        self->on_seen(index, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
      }
      self->listen(index, connection);
    });
  });
}

void Reach::on_seen(std::size_t index, const std::string& address) {
  if (!iroh::is_socket_address(address)) {
    log_once(LogLevel::warn, "observer " + std::to_string(index), "an observer said something that is no address");
    return;
  }
  std::string old;
  bool still_said = false;
  {
    const std::lock_guard lock(mutex_);
    old = std::exchange(observers_[index].seen, address);
    still_said = std::any_of(observers_.begin(), observers_.end(), [&](const auto& one) { return one.seen == old; });
  }
  if (old == address) return;
  log(LogLevel::info, "seen from outside as " + address);
  // Only when iroh has taken the address is it part of what peers are told.
  endpoint_.add_external_addr(address).then([weak = weak_from_this()](const Result<Nothing>&) {
    if (const auto self = weak.lock()) self->changed_.notify_all();
  });
  if (!old.empty() && !still_said) endpoint_.remove_external_addr(old).then([](const Result<Nothing>&) {});
  changed_.notify_all();
}

void Reach::on_lost(std::size_t index, const std::string& why) {
  log(LogLevel::debug, "observer " + options_.observers[index].substr(0, 10) + ": " + why);
  const std::lock_guard lock(mutex_);
  observers_[index].dialing = false;
  observers_[index].connection = {};
  observers_[index].retry_at = after(Clock::now(), kRedialPause);
}

std::vector<std::string> Reach::observed() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> all;
  for (const Observer& observer : observers_) {
    if (!observer.seen.empty()) all.push_back(observer.seen);
  }
  return all;
}

}  // namespace torch_iroh::link
