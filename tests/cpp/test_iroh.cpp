// The wrapper of the iroh library, with the real library on 127.0.0.1. TORCH_IROH_LIBRARY names it.
#include <doctest/doctest.h>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "iroh_support.hpp"

namespace {

using namespace torch_iroh;
using namespace torch_iroh::testing;
using iroh::Library;

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}
std::string text_of(const Payload& payload) {
  return {reinterpret_cast<const char*>(payload.bytes().data()), payload.size()};
}

// Runs one (otherwise skipped) test case of this program in a new process, where no library is open.
int run_alone(const std::string& test_case) {
  const std::string filter = "--test-case=" + test_case;
  const pid_t child = fork();
  if (child == 0) {
    execl(g_program.c_str(), g_program.c_str(), filter.c_str(), "--no-skip", "--minimal", static_cast<char*>(nullptr));
    _exit(126);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Runs `body` in a forked child of this process, and returns how that ended.
template <typename Body>
int in_child(Body body) {
  const pid_t child = fork();
  if (child == 0) {
    // _exit: the child shares the parent's test runner, whose report must not be printed twice.
    try {
      _exit(body());
    } catch (...) {
      _exit(99);
    }
  }
  int status = -1;
  const bool ended = eventually([&] { return waitpid(child, &status, WNOHANG) == child; });
  if (!ended) {
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

template <typename Call>
Error error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return {ErrorKind::invalid, "(no error)"};
}

}  // namespace

// ---- the library ----

TEST_CASE("library: in a process of its own: refused files" * doctest::skip()) {
  const std::string real = std::getenv("TORCH_IROH_LIBRARY");
  unsetenv("TORCH_IROH_LIBRARY");
  CHECK_FALSE(Library::is_open());
  CHECK_FALSE(Library::inherited());

  const Error closed = error_of([] { iroh::Endpoint::bind({}); });
  CHECK(closed.kind() == ErrorKind::library);
  CHECK_MESSAGE(contains(closed.what(), "not open yet"), std::string(closed.what()));

  const Error none = error_of([] { Library::open("", ""); });
  CHECK(none.kind() == ErrorKind::library);
  CHECK_MESSAGE(contains(none.what(), "the iroh package is not installed"), std::string(none.what()));

  const Error missing = error_of([] { Library::open("/nowhere/libiroh_ffi.so", "1.2.0"); });
  CHECK(missing.kind() == ErrorKind::library);
  CHECK_MESSAGE(contains(missing.what(), "cannot open the iroh library: /nowhere/libiroh_ffi.so"),
                std::string(missing.what()));
  CHECK(contains(missing.what(), "TORCH_IROH_LIBRARY"));

#ifdef __APPLE__
  const std::string other = "/usr/lib/libz.dylib";
#else
  const std::string other = "libm.so.6";
#endif
  const Error foreign = error_of([&] { Library::open(other, "9.9.9"); });
  CHECK(foreign.kind() == ErrorKind::library);
  CHECK_MESSAGE(contains(foreign.what(), "(installed version: 9.9.9) does not fit: symbol "),
                std::string(foreign.what()));
  CHECK(contains(foreign.what(), "is missing. Supported: iroh 1.2.x"));

  setenv("TORCH_IROH_LIBRARY", other.c_str(), 1);  // goes before what the caller asks for
  const Error overridden = error_of([&] { Library::open(real, "1.2.0"); });
  CHECK_MESSAGE(contains(overridden.what(), other + " (installed version: unknown) does not fit"),
                std::string(overridden.what()));
  CHECK_FALSE(Library::is_open());

  unsetenv("TORCH_IROH_LIBRARY");  // no failure is remembered
  Library::open(real, "1.2.0");
  CHECK(Library::is_open());
  CHECK_NOTHROW(Library::open(real, "1.2.0"));
  const Error second = error_of([&] { Library::open("/nowhere/libiroh_ffi.so", ""); });
  CHECK(second.kind() == ErrorKind::library);
  CHECK_MESSAGE(contains(second.what(), "already open from " + real), std::string(second.what()));
  CHECK(contains(second.what(), "cannot open another one from /nowhere/libiroh_ffi.so"));
}

TEST_CASE("library: a missing, foreign or second file is refused with what to do") {
  if (!have_library()) return;
  CHECK(run_alone("library: in a process of its own: refused files") == 0);
}

TEST_CASE("endpoint id: hex there and back") {
  iroh::EndpointId id{};
  for (std::size_t i = 0; i < id.size(); ++i) id[i] = static_cast<std::byte>(i * 37);
  const std::string hex = iroh::to_hex(id);
  CHECK(hex.substr(0, 12) == "00254a6f94b9");
  CHECK(iroh::short_name(id) == "00254a6f94");
  CHECK(iroh::id_from_hex(hex) == id);
  CHECK_FALSE(iroh::id_from_hex(hex.substr(2)));
  CHECK_FALSE(iroh::id_from_hex(hex + "00"));
  CHECK_FALSE(iroh::id_from_hex("zz" + hex.substr(2)));
  CHECK_FALSE(iroh::id_from_hex(std::string(64, 'A')));
}

// ---- endpoints and futures ----

TEST_CASE("endpoint: binds, knows its id and address, connects, accepts and closes") {
  if (!have_library()) return;
  ConnectedPair pair;
  CHECK(pair.dialer.id() != pair.listener.id());
  const iroh::EndpointAddr addr = pair.listener.addr();
  CHECK(addr.id == pair.listener.id());
  CHECK_FALSE(addr.relay_url);
  REQUIRE(addr.direct.size() >= 1);
  CHECK(contains(addr.direct[0], "127.0.0.1:"));
  CHECK(contains(pair.listener.bound_sockets().at(0), "127.0.0.1:"));
  CHECK(pair.dialed.remote_id() == pair.listener.id());
  CHECK(pair.accepted.remote_id() == pair.dialer.id());

  CHECK(eventually([&] {
    for (const iroh::Path& path : pair.dialed.paths()) {
      if (path.selected) return !path.relay && contains(path.remote_addr, "127.0.0.1:") && path.mtu >= 1200;
    }
    return false;
  }));
  CHECK(pair.dialed.stats().sent_datagrams > 0);
  CHECK(pair.dialed.stats().received_bytes > 0);

  auto ended = pair.accepted.closed();
  pair.dialed.close(7, "that is why");
  const std::string reason = std::move(ended).get(soon());
  CHECK_MESSAGE(contains(reason, "that is why"), reason);
}

TEST_CASE("endpoint: a secret key makes the id, each time the same") {
  if (!have_library()) return;
  iroh::EndpointOptions options;
  options.alpns = {kTestAlpn};
  options.bind_addr = "127.0.0.1:0";
  options.secret_key.emplace();
  options.secret_key->fill(std::byte{7});
  iroh::Endpoint first = iroh::Endpoint::bind(options).get(soon());
  iroh::Endpoint second = iroh::Endpoint::bind(options).get(soon());
  CHECK(first.id() == second.id());
  first.close().get(soon());
  second.close().get(soon());
}

TEST_CASE("endpoint: the public key of a secret key is the id of its endpoint, and that of RFC 8032") {
  if (!have_library()) return;
  iroh::SecretKey key{};
  const std::string seed = "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60";  // test 1 of section 7.1
  for (std::size_t i = 0; i < key.size(); ++i) key[i] = std::byte(std::stoi(seed.substr(2 * i, 2), nullptr, 16));
  CHECK(iroh::to_hex(iroh::public_key(key)) == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a");
  iroh::EndpointOptions options;
  options.alpns = {kTestAlpn};
  options.bind_addr = "127.0.0.1:0";
  options.secret_key = key;
  const iroh::Endpoint endpoint = iroh::Endpoint::bind(options).get(soon());
  CHECK(endpoint.id() == iroh::public_key(key));
  endpoint.close().get(soon());
}

TEST_CASE("endpoint: several protocols, each connection says which") {
  if (!have_library()) return;
  iroh::EndpointOptions options;
  options.alpns = {"one/1", "two/1"};
  options.bind_addr = "127.0.0.1:0";
  const iroh::Endpoint listener = iroh::Endpoint::bind(options).get(soon());
  const iroh::Endpoint dialer = bind_loopback();
  for (const std::string alpn : {"two/1", "one/1"}) {
    Outcome outcome;
    iroh::Connection dialed;
    dialer.connect(listener.addr(), alpn).then([&](Result<iroh::Connection> result) {
      if (result.ok()) dialed = result.value();
      const Error* error = result.ok() ? nullptr : &result.error();
      outcome.set(error);
    });
    const auto accepted = listener.accept_next().get(soon())->accept().get(soon()).handshake().get(soon());
    REQUIRE(outcome.wait());
    CHECK(accepted.alpn() == alpn);
    CHECK(dialed.alpn() == alpn);
  }
  dialer.close().get(soon());
  listener.close().get(soon());
}

TEST_CASE("endpoint: an external address is one of its addresses, until it is taken back") {
  if (!have_library()) return;
  const iroh::Endpoint endpoint = bind_loopback();
  const auto has = [&](const std::string& wanted) {
    const auto direct = endpoint.addr().direct;
    return std::find(direct.begin(), direct.end(), wanted) != direct.end();
  };
  endpoint.add_external_addr("203.0.113.7:4242").get(soon());
  CHECK(eventually([&] { return has("203.0.113.7:4242"); }));
  endpoint.remove_external_addr("203.0.113.7:4242").get(soon());
  CHECK(eventually([&] { return !has("203.0.113.7:4242"); }));
  endpoint.close().get(soon());
}

TEST_CASE("stream: both ways, half closed, and reset") {
  if (!have_library()) return;
  ConnectedPair pair;
  const auto text = [](const Payload& payload) {
    return std::string(reinterpret_cast<const char*>(payload.bytes().data()), payload.size());
  };
  const auto bytes = [](const std::string& from) { return std::as_bytes(std::span(from.data(), from.size())); };
  iroh::BiStream here = pair.dialed.open_bi().get(soon());
  here.send.write_all(bytes("ping")).get(soon());
  here.send.finish().get(soon());
  iroh::BiStream there = pair.accepted.accept_bi().get(soon());
  CHECK(text(there.receive.read_exact(4).get(soon())) == "ping");
  CHECK(there.receive.read(1).get(soon()).size() == 0);
  there.send.write_all(bytes("pong")).get(soon());  // this half is still open
  CHECK(text(here.receive.read_exact(4).get(soon())) == "pong");
  there.send.reset(9).get(soon());
  const Error error = error_of([&] { here.receive.read(1).get(soon()); });
  CHECK(error.kind() == ErrorKind::network);
}

TEST_CASE("endpoint: accept ends with none when the endpoint closes") {
  if (!have_library()) return;
  const iroh::Endpoint endpoint = bind_loopback();
  auto incoming = endpoint.accept_next();
  endpoint.close().get(soon());
  CHECK_FALSE(std::move(incoming).get(soon()));
  CHECK_FALSE(endpoint.accept_next().get(soon()));
}

TEST_CASE("future: an error keeps iroh's text and kind, and says what was being done") {
  if (!have_library()) return;
  iroh::EndpointOptions options;
  options.alpns = {kTestAlpn};
  options.bind_addr = "not an address";
  const Error bind = error_of([&] { iroh::Endpoint::bind(options).get(soon()); });
  CHECK(bind.kind() == ErrorKind::network);
  CHECK_MESSAGE(contains(bind.what(), "iroh: set the bind address: "), std::string(bind.what()));
  CHECK_MESSAGE(contains(bind.what(), " ["), std::string(bind.what()));

  const iroh::Endpoint endpoint = bind_loopback();
  const Error self = error_of([&] { endpoint.connect(endpoint.addr(), kTestAlpn).get(soon()); });
  CHECK(self.kind() == ErrorKind::network);
  CHECK_MESSAGE(contains(self.what(), "iroh: connect: "), std::string(self.what()));
  CHECK_MESSAGE(contains(self.what(), " [connect]"), std::string(self.what()));

  iroh::EndpointAddr bad = endpoint.addr();
  bad.relay_url = "no url";
  const Error url = error_of([&] { endpoint.connect(bad, kTestAlpn).get(soon()); });
  CHECK(url.kind() == ErrorKind::network);
  CHECK_MESSAGE(contains(url.what(), "iroh: connect: "), std::string(url.what()));

  const iroh::Endpoint other = bind_loopback("another/1");
  auto incoming = other.accept_next();
  Outcome outcome;
  endpoint.connect(other.addr(), kTestAlpn).then([&](Result<iroh::Connection> result) {
    const Error* error = result.ok() ? nullptr : &result.error();
    outcome.set(error);
  });
  const Error refused =
      error_of([&] { std::move(incoming).get(soon())->accept().get(soon()).handshake().get(soon()); });
  CHECK(outcome.wait());
  CHECK(outcome.error().has_value());
  CHECK_MESSAGE(outcome.error()->kind() == ErrorKind::network, std::string(outcome.error()->what()));
  CHECK_MESSAGE(contains(outcome.error()->what(), "iroh: connect: "), std::string(outcome.error()->what()));
  endpoint.close().get(soon());
  other.close().get(soon());
}

TEST_CASE("future: a deadline cancels, and leaves the endpoint usable") {
  if (!have_library()) return;
  const iroh::Endpoint endpoint = bind_loopback();
  const TimePoint begin = Clock::now();
  const Error late = error_of([&] { endpoint.accept_next().get(after(begin, milliseconds(60))); });
  CHECK(late.kind() == ErrorKind::timeout);
  CHECK(Clock::now() - begin >= milliseconds(60));
  CHECK(Clock::now() - begin < milliseconds(10'000));
  CHECK(error_of([&] { endpoint.accept_next().get(Clock::now()); }).kind() == ErrorKind::timeout);
  CHECK(error_of([&] { endpoint.accept_next().get(TimePoint{}); }).kind() == ErrorKind::timeout);

  const iroh::Endpoint dialer = bind_loopback();
  Outcome outcome;
  dialer.connect(endpoint.addr(), kTestAlpn).then([&](Result<iroh::Connection> result) {
    const Error* error = result.ok() ? nullptr : &result.error();
    outcome.set(error);
  });
  const auto incoming = endpoint.accept_next().get(soon());
  REQUIRE(incoming.has_value());
  const iroh::Connection connection = incoming->accept().get(soon()).handshake().get(soon());
  CHECK(outcome.wait());
  CHECK_FALSE(outcome.error());
  endpoint.close().get(soon());
  dialer.close().get(soon());
}

TEST_CASE("future: a cancelled one ends once, with aborted, and cancelling again does nothing") {
  if (!have_library()) return;
  const iroh::Endpoint endpoint = bind_loopback();
  const int count = kSanitized ? 30 : 200;
  for (int i = 0; i < count; ++i) {
    const auto outcome = std::make_shared<Outcome>();
    auto canceller = endpoint.accept_next().then([outcome](Result<std::optional<iroh::Incoming>> result) {
      const Error* error = result.ok() ? nullptr : &result.error();
      outcome->set(error);
    });
    if (i % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(i * 10));
    auto copy = canceller;
    canceller.cancel();
    canceller.cancel();
    copy.cancel();
    CHECK(outcome->wait());
    CHECK(outcome->calls() == 1);
    REQUIRE(outcome->error().has_value());
    CHECK_MESSAGE(outcome->error()->kind() == ErrorKind::aborted, std::string(outcome->error()->what()));
  }
  endpoint.close().get(soon());
}

TEST_CASE("future: one that is dropped without being started asks for nothing and leaks nothing") {
  if (!have_library()) return;
  const iroh::Endpoint endpoint = bind_loopback();
  for (int i = 0; i < 20; ++i) {
    auto incoming = endpoint.accept_next();
    auto connecting = endpoint.connect(endpoint.addr(), kTestAlpn);
  }
  endpoint.close().get(soon());
}

// ---- streams ----

TEST_CASE("stream: bytes arrive, reads have limits, the end is empty, and stopped() waits for it") {
  if (!have_library()) return;
  ConnectedPair pair;
  auto [send, recv] = pair.stream(bytes_of("hello "));
  send.write_all(bytes_of("wo"), bytes_of("rld")).get(soon());
  CHECK(text_of(recv.read_exact(8).get(soon())) == "hello wo");
  CHECK(text_of(recv.read(2).get(soon())).substr(0, 1) == "r");
  send.write_all({}, {}).get(soon());
  send.finish().get(soon());
  auto stopped = send.stopped();
  std::string rest;
  for (;;) {
    const Payload more = recv.read(100).get(soon());
    if (more.size() == 0) break;
    rest += text_of(more);
  }
  CHECK((rest == "d" || rest == "ld"));
  CHECK(recv.read(10).get(soon()).size() == 0);
  std::move(stopped).get(soon());
}

TEST_CASE("stream: an exact read of more than there is fails, and so does a write to a stopped stream") {
  if (!have_library()) return;
  ConnectedPair pair;
  {
    auto [send, recv] = pair.stream(bytes_of("short"));
    send.finish().get(soon());
    const Error error = error_of([&recv = recv] { recv.read_exact(6).get(soon()); });
    CHECK(error.kind() == ErrorKind::network);
    CHECK_MESSAGE(contains(error.what(), "iroh: read from a stream: "), std::string(error.what()));
  }
  {
    auto [send, recv] = pair.stream(bytes_of("x"));
    recv.stop(3).get(soon());
    CHECK(eventually([&send = send] {
      const Error error = error_of([&] { send.write_all(bytes_of("more")).get(soon()); });
      return error.kind() == ErrorKind::network && contains(error.what(), "iroh: write to a stream: ");
    }));
  }
  {
    auto [send, recv] = pair.stream(bytes_of("x"));
    auto read = recv.read_exact(100);
    pair.dialed.close(9, "gone");
    const Error error = error_of([&] { std::move(read).get(soon()); });
    CHECK(error.kind() == ErrorKind::network);
  }
}

TEST_CASE("stream: what was read stays readable when its stream and connection are gone") {
  if (!have_library()) return;
  Payload kept;
  {
    ConnectedPair pair;
    auto [send, recv] = pair.stream(bytes_of("abcdef"));
    kept = recv.read_exact(6).get(soon()).slice(2, 3);
  }
  CHECK(text_of(kept) == "cde");
}

TEST_CASE("stream: futures of many streams at once all end") {
  if (!have_library()) return;
  ConnectedPair pair;
  const int count = kSanitized ? 20 : 64;
  std::vector<std::shared_ptr<Outcome>> outcomes;
  for (int i = 0; i < count; ++i) {
    const auto outcome = std::make_shared<Outcome>();
    outcomes.push_back(outcome);
    pair.dialed.open_uni().then([outcome, i](Result<iroh::SendStream> stream) {
      if (!stream.ok()) return outcome->set(&stream.error());
      const auto send = std::make_shared<iroh::SendStream>(std::move(stream.value()));
      const std::vector<std::byte> bytes(1000, static_cast<std::byte>(i));
      send->write_all(bytes).then([outcome, send](Result<Nothing> written) {
        if (!written.ok()) return outcome->set(&written.error());
        send->finish().then([outcome, send](Result<Nothing>) { outcome->set(nullptr); });
      });
    });
  }
  for (int i = 0; i < count; ++i) {
    auto recv = pair.accepted.accept_uni().get(soon());
    const Payload bytes = recv.read_exact(1000).get(soon());
    const auto first = bytes.bytes().front();
    CHECK(std::all_of(bytes.bytes().begin(), bytes.bytes().end(), [&](std::byte byte) { return byte == first; }));
  }
  for (const auto& outcome : outcomes) {
    CHECK(outcome->wait());
    CHECK_FALSE(outcome->error());
  }
}

// ---- fork ----

TEST_CASE("fork: a child lets go of inherited objects without touching them, and is told what to do") {
  if (!have_library()) return;
  auto pair = std::make_unique<ConnectedPair>();
  auto stream = std::make_unique<std::pair<iroh::SendStream, iroh::RecvStream>>(pair->stream(bytes_of("before")));
  auto payload = std::make_unique<Payload>(stream->second.read_exact(6).get(soon()));
  auto future = std::make_unique<iroh::Future<std::string>>(pair->dialed.closed());
  Outcome outcome;
  iroh::Canceller started = pair->accepted.closed().then([&](Result<std::string>) { outcome.set(nullptr); });
  const int status = in_child([&]() -> int {
    if (!Library::inherited()) return 1;
    if (text_of(*payload) != "before") return 2;
    started.cancel();
    future.reset();
    payload.reset();
    stream.reset();
    const Error refused = error_of([&] { pair->dialer.id(); });
    if (refused.kind() != ErrorKind::library || !contains(refused.what(), "forked")) return 3;
    if (!contains(error_of([] { Library::open("", ""); }).what(), "forked")) return 4;
    pair->dialed = {};
    pair->accepted = {};
    pair->dialer = {};
    pair->listener = {};
    return 0;
  });
  CHECK(status == 0);
  CHECK_FALSE(Library::inherited());
  CHECK(text_of(*payload) == "before");  // the parent goes on as if nothing had been
  stream->first.write_all(bytes_of("after")).get(soon());
  CHECK(text_of(stream->second.read_exact(5).get(soon())) == "after");
  future.reset();
  payload.reset();
  stream.reset();
  pair.reset();
  CHECK(outcome.wait());
}

TEST_CASE("fork: SIGCHLD of a child does not disturb a blocked wait") {
  if (!have_library()) return;
  ConnectedPair pair;
  auto incoming = pair.listener.accept_next();
  const TimePoint begin = Clock::now();
  for (int i = 0; i < 3; ++i) CHECK(in_child([] { return 0; }) == 0);
  CHECK(error_of([&] { std::move(incoming).get(after(begin, milliseconds(100))); }).kind() == ErrorKind::timeout);
}
