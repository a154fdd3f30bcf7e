#include "device.hpp"

#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <sched.h>
#include <sys/ioctl.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "frame.hpp"

namespace torch_iroh::lab {
namespace {

// Younger than some systems' headers (Linux 6.2).
constexpr unsigned kOffloadUdp4 = 0x20, kOffloadUdp6 = 0x40;

// Puts this thread into another network namespace, and back.
class Visit {
 public:
  explicit Visit(const std::string& space)
      : home_(checked(open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC), "own namespace")) {
    const std::string path = "/run/netns/" + space;
    const Descriptor there(checked(open(path.c_str(), O_RDONLY | O_CLOEXEC), path));
    checked(setns(there.get(), CLONE_NEWNET), "setns " + space);
  }
  // The way back was open a moment ago; a thread that stayed would make the next site's device in the wrong place.
  ~Visit() {
    if (setns(home_.get(), CLONE_NEWNET) != 0) std::terminate();
  }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

 private:
  Descriptor home_;
};

}  // namespace

int checked(int result, const std::string& what) {
  if (result < 0) throw std::system_error(errno, std::generic_category(), what);
  return result;
}

Descriptor open_device(const std::string& space) {
  if (space.find('/') != std::string::npos || space.starts_with('.'))
    throw std::invalid_argument("not a namespace's name");
  const Visit visit(space);
  Descriptor device(checked(open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC), "/dev/net/tun"));
  ifreq request{};
  std::strcpy(request.ifr_name, "wan0");
  request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
  checked(ioctl(device.get(), TUNSETIFF, &request), "TUNSETIFF wan0");
  int header = Frame::kVirtioBytes;
  checked(ioctl(device.get(), TUNSETVNETHDRSZ, &header), "TUNSETVNETHDRSZ");
  const unsigned offload = TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN;
  // Kernels before 6.2 cut UDP super-frames themselves.
  if (ioctl(device.get(), TUNSETOFFLOAD, offload | kOffloadUdp4 | kOffloadUdp6) != 0) {
    checked(ioctl(device.get(), TUNSETOFFLOAD, offload), "TUNSETOFFLOAD");
  }
  int unlimited = INT_MAX;
  checked(ioctl(device.get(), TUNSETSNDBUF, &unlimited), "TUNSETSNDBUF");
  return device;
}

}  // namespace torch_iroh::lab
