// The emulator's commands: one request is a few lines of text, one command each, and one reply.
//
//   site NAME NAMESPACE REGION         a TUN device `wan0` in that network namespace
//   route NAME PREFIX...               addresses that lead to the site, in place of those before
//   line NAME up=MBIT down=MBIT queue=MS mtu=BYTES cut=0|1 plugged=0|1
//   everywhere | regions A B | sites A B, each with: delay=MS jitter=MS loss=PERCENT reorder=0|1 cut=0|1
//                                      from A to B; `inherit` instead of a number: what the wider rule says
//   counters | traffic                 replies JSON
//
// The reply is "ok", or JSON, or "error: " and what was wrong; commands after the wrong one are not run.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "network.hpp"

namespace torch_iroh::lab {

class Control {
 public:
  // Called before a site is added; throws std::exception when its device cannot be made.
  using OpenDevice = std::function<void(const std::string& space)>;
  Control(Network& network, OpenDevice open) : network_(network), open_(std::move(open)) {}

  std::string handle(std::string_view request);

 private:
  std::string run(std::string_view line);
  std::string counters() const;
  std::string traffic() const;

  Network& network_;
  OpenDevice open_;
};

}  // namespace torch_iroh::lab
