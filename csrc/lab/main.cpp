// The emulator as a process: `emulator CONTROL OWNER SEED`. Carries frames between the TUN devices of its sites, and
// takes commands (control.hpp) on the unix datagram socket CONTROL, until the process OWNER ends or it gets SIGTERM or
// SIGINT. One thread; it sleeps until a frame comes or is due.
//
// Prints one line when it can be used: "ready realtime=0|1".
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include <array>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "control.hpp"
#include "device.hpp"
#include "network.hpp"

namespace torch_iroh::lab {
namespace {

constexpr std::size_t kFrameBytes = std::size_t{128} << 10;
constexpr int kFramesPerTurn = 32;  // then the other sites, and what is due
constexpr std::size_t kRequestBytes = 8192;

Time now() {
  return std::chrono::duration_cast<Time>(std::chrono::steady_clock::now().time_since_epoch());
}

template <typename T>
T whole_number(const char* text) {
  T value{};
  const char* end = text + std::strlen(text);
  const auto [at, error] = std::from_chars(text, end, value);
  if (error != std::errc() || at != end) throw std::invalid_argument(std::string(text) + " is not a whole number");
  return value;
}

Descriptor listen_on(const std::string& path) {
  Descriptor socket(checked(::socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), "control socket"));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) throw std::invalid_argument("the path of the control socket is too long");
  std::memcpy(address.sun_path, path.data(), path.size());
  checked(bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), path);
  return socket;
}

Descriptor end_signals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  checked(sigprocmask(SIG_BLOCK, &signals, nullptr), "sigprocmask");
  return Descriptor(checked(signalfd(-1, &signals, SFD_NONBLOCK | SFD_CLOEXEC), "signalfd"));
}

class Emulator {
 public:
  Emulator(const std::string& control, pid_t owner, std::uint64_t seed)
      : network_(seed),
        control_(network_, [this](const std::string& space) { devices_.push_back(open_device(space)); }),
        signals_(end_signals()),
        owner_(checked(static_cast<int>(syscall(SYS_pidfd_open, owner, 0)), "pidfd_open of the owner")),
        socket_(listen_on(control)) {}

  void run() {
    for (std::vector<pollfd> polled; wait(polled);) {
      for (SiteId site = 0; site < devices_.size(); ++site) read_frames(site, polled[kOthers + site].revents);
      network_.advance(now(), [this](SiteId to, std::span<const std::uint8_t> frame) {
        return write(devices_[to].get(), frame.data(), frame.size()) == static_cast<ssize_t>(frame.size());
      });
      if (polled[kControl].revents) take_commands();
    }
  }

 private:
  enum : std::size_t { kSignals, kOwner, kControl, kOthers };

  // False when it is time to end.
  bool wait(std::vector<pollfd>& polled) {
    polled.clear();
    for (const Descriptor* one : {&signals_, &owner_, &socket_}) polled.push_back({one->get(), POLLIN, 0});
    for (const Descriptor& device : devices_) polled.push_back({device.get(), POLLIN, 0});
    timespec pause{};
    const std::optional<Time> next = network_.next();
    if (next) {
      const Nanoseconds left = std::max(Nanoseconds(0), *next - now());
      const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
      pause = {.tv_sec = seconds.count(), .tv_nsec = (left - seconds).count()};
    }
    if (ppoll(polled.data(), polled.size(), next ? &pause : nullptr, nullptr) < 0 && errno != EINTR) {
      checked(-1, "ppoll");
    }
    return !polled[kSignals].revents && !polled[kOwner].revents;
  }

  void read_frames(SiteId site, short events) {
    if (events & (POLLERR | POLLNVAL)) {  // its namespace is gone; a poll would never sleep again
      devices_[site].reset();
      return;
    }
    if (!(events & POLLIN)) return;
    const Time at = now();
    for (int turn = 0; turn < kFramesPerTurn; ++turn) {
      const ssize_t count = read(devices_[site].get(), frame_.data(), frame_.size());
      if (count <= 0) return;
      network_.offer(site, {frame_.data(), static_cast<std::size_t>(count)}, at);
    }
  }

  void take_commands() {
    std::array<char, kRequestBytes> request;
    sockaddr_un from{};
    socklen_t length = sizeof from;
    while (true) {
      length = sizeof from;
      const ssize_t count = recvfrom(socket_.get(), request.data(), request.size(), MSG_TRUNC,
                                     reinterpret_cast<sockaddr*>(&from), &length);
      if (count < 0) return;
      const std::string reply = static_cast<std::size_t>(count) > request.size()
                                    ? "error: the request is longer than " + std::to_string(kRequestBytes) + " bytes"
                                    : control_.handle({request.data(), static_cast<std::size_t>(count)});
      // Who asks waits with a deadline and says so if nothing comes.
      (void)sendto(socket_.get(), reply.data(), reply.size(), MSG_DONTWAIT, reinterpret_cast<sockaddr*>(&from), length);
    }
  }

  Network network_;
  std::vector<Descriptor> devices_;  // of each site
  Control control_;
  Descriptor signals_, owner_, socket_;
  std::vector<std::uint8_t> frame_ = std::vector<std::uint8_t>(kFrameBytes);
};

int main(int count, char** arguments) {
  if (count != 4) {
    std::fprintf(stderr, "usage: %s CONTROL OWNER SEED\n", arguments[0]);
    return 2;
  }
  Emulator emulator(arguments[1], whole_number<pid_t>(arguments[2]), whole_number<std::uint64_t>(arguments[3]));
  // Before others: what else a machine does is no part of a link. A container may forbid it; then the owner says so.
  const sched_param priority{.sched_priority = 1};
  const bool realtime = sched_setscheduler(0, SCHED_RR, &priority) == 0;
  prctl(PR_SET_TIMERSLACK, 1000UL);
  std::printf("ready realtime=%d\n", realtime ? 1 : 0);
  std::fflush(stdout);
  emulator.run();
  return 0;
}

}  // namespace
}  // namespace torch_iroh::lab

int main(int count, char** arguments) {
  try {
    return torch_iroh::lab::main(count, arguments);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "lab emulator: %s\n", error.what());
    return 1;
  }
}
