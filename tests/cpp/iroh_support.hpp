// What the tests of the real iroh library share: opening it, and a connected pair of endpoints on 127.0.0.1.
#pragma once

#include <doctest/doctest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "iroh/endpoint.hpp"
#include "iroh/library.hpp"
#include "support.hpp"

namespace torch_iroh::testing {

inline TimePoint soon() {
  return after(Clock::now(), kPatience);
}

// False, after one line that says why, where there is no library to test; that is a failure where one is required.
inline bool have_library() {
  const char* path = std::getenv("TORCH_IROH_LIBRARY");
  if (path != nullptr && *path != '\0') {
    iroh::Library::open(path, "");
    return true;
  }
  const char* required = std::getenv("TORCH_IROH_REQUIRE_LIBRARY");
  if (required != nullptr && std::string(required) == "1") {
    FAIL("TORCH_IROH_REQUIRE_LIBRARY=1, but TORCH_IROH_LIBRARY names no library");
  }
  static const bool said = [] {
    std::puts("tests of the iroh library are left out: TORCH_IROH_LIBRARY names no library");
    return true;
  }();
  static_cast<void>(said);
  return false;
}

inline constexpr const char* kTestAlpn = "torch-iroh-test/1";

inline iroh::Endpoint bind_loopback(const std::string& alpn = kTestAlpn) {
  iroh::EndpointOptions options;
  options.alpns = {alpn};
  options.bind_addr = "127.0.0.1:0";
  return iroh::Endpoint::bind(options).get(soon());
}

struct ConnectedPair {
  iroh::Endpoint dialer, listener;
  iroh::Connection dialed, accepted;
  ConnectedPair() : dialer(bind_loopback()), listener(bind_loopback()) {
    auto incoming = listener.accept_next();
    auto connecting = dialer.connect(listener.addr(), kTestAlpn);
    // Polled by nobody until now: the dial must run beside the accept.
    Outcome outcome;
    iroh::Connection connection;
    std::move(connecting).then([&](Result<iroh::Connection> result) {
      if (result.ok()) connection = result.value();
      const Error* error = result.ok() ? nullptr : &result.error();
      outcome.set(error);
    });
    accepted = std::move(incoming).get(soon())->accept().get(soon()).handshake().get(soon());
    REQUIRE(outcome.wait());
    REQUIRE_FALSE(outcome.error());
    dialed = connection;
  }
  ~ConnectedPair() {
    dialed.close(0, "the test is over");
    try {
      dialer.close().get(soon());
      listener.close().get(soon());
    } catch (const Error& error) {
      MESSAGE("closing: " << error.what());
    }
  }
  ConnectedPair(const ConnectedPair&) = delete;
  ConnectedPair& operator=(const ConnectedPair&) = delete;

  // A stream from the dialer to the listener. It exists for the listener once something was written to it.
  std::pair<iroh::SendStream, iroh::RecvStream> stream(std::span<const std::byte> first) {
    iroh::SendStream send = dialed.open_uni().get(soon());
    send.write_all(first).get(soon());
    return {std::move(send), accepted.accept_uni().get(soon())};
  }
};

}  // namespace torch_iroh::testing
