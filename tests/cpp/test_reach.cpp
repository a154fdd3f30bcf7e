// How a process learns how it is reached: relays and observers as users write them, and an observer that speaks.
#include "link/reach.hpp"

#include <algorithm>
#include <atomic>
#include <thread>

#include "iroh_support.hpp"

namespace torch_iroh::testing {
namespace {

using link::Reach;
using link::ReachOptions;

const std::string kId(64, 'a');

ReachOptions relays_of(const std::string& text) {
  ReachOptions options;
  link::parse_relays(text, "token", options);
  return options;
}

template <typename Call>
Error error_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return Error(ErrorKind::aborted, "no error");
}

// An endpoint that plays the observer, by hand.
struct Observer {
  iroh::Endpoint endpoint = bind_loopback(link::kObserveAlpn);
  iroh::Connection connection;
  std::vector<iroh::SendStream> kept;

  std::string text() const { return iroh::to_hex(endpoint.id()) + "@" + endpoint.addr().direct.front(); }
  void accept() { connection = endpoint.accept_next().get(soon())->accept().get(soon()).handshake().get(soon()); }
  void say(const std::string& address) {
    kept.push_back(connection.open_uni().get(soon()));
    kept.back().write_all(std::as_bytes(std::span(address.data(), address.size()))).get(soon());
    kept.back().finish().get(soon());
  }
};

}  // namespace

TEST_CASE("reach: relays are URLs, n0 or none") {
  const ReachOptions two = relays_of(" http://203.0.113.1:3340 ,https://relay.example.org");
  REQUIRE(two.relays.size() == 2);
  CHECK(two.relays[0].url == "http://203.0.113.1:3340");
  CHECK(two.relays[1].url == "https://relay.example.org");
  CHECK(two.relays[1].auth_token == "token");
  CHECK_FALSE(two.public_relays);
  CHECK(relays_of("n0").public_relays);
  CHECK(relays_of("n0").relays.empty());
  CHECK(relays_of("none") == ReachOptions{});
  CHECK(relays_of("") == ReachOptions{});
  for (const std::string wrong : {"relay.example.org", "http://", "ftp://x", "http://a b", "none,n0", "n0,http://x"}) {
    const Error error = error_of([&] { relays_of(wrong); });
    CHECK_MESSAGE(error.kind() == ErrorKind::invalid, wrong);
    CHECK_MESSAGE(contains(error.what(), wrong), std::string(error.what()));
  }
}

TEST_CASE("reach: observers are an id and an address") {
  const auto two = link::parse_observers(kId + "@203.0.113.1:4000, " + kId + "@[2001:db8::1]:4000");
  REQUIRE(two.size() == 2);
  CHECK(two[1] == kId + "@[2001:db8::1]:4000");
  CHECK(link::parse_observers("").empty());
  for (const std::string wrong : {"203.0.113.1:4000", "@203.0.113.1:4000", "ab@203.0.113.1:4000"}) {
    CHECK_MESSAGE(error_of([&] { link::parse_observers(wrong); }).kind() == ErrorKind::invalid, wrong);
  }
  CHECK(error_of([&] { link::parse_observers(kId + "@host:1"); }).kind() == ErrorKind::invalid);
}

TEST_CASE("reach: what the observer saw becomes an address of the endpoint, and the newest replaces it") {
  if (!have_library()) return;
  Observer observer;
  const iroh::Endpoint endpoint = bind_loopback();
  const auto reach = std::make_shared<Reach>(endpoint, ReachOptions{{}, false, {observer.text()}});
  const auto has = [&](const std::string& wanted) {
    const auto direct = endpoint.addr().direct;
    return std::find(direct.begin(), direct.end(), wanted) != direct.end();
  };
  reach->start(after(Clock::now(), milliseconds(1)));  // does not wait for what comes later
  observer.accept();
  observer.say("203.0.113.9:777");
  CHECK(eventually([&] { return has("203.0.113.9:777"); }));
  CHECK(reach->observed() == std::vector<std::string>{"203.0.113.9:777"});
  observer.say("not an address");
  observer.say("203.0.113.9:778");
  CHECK(eventually([&] { return has("203.0.113.9:778") && !has("203.0.113.9:777"); }));

  // A lost observer is asked again.
  observer.connection.close(0, "restart");
  std::atomic<bool> back{false};
  auto again = std::thread([&] {
    observer.accept();
    back = true;
  });
  CHECK(eventually([&] {
    reach->on_tick(Clock::now());
    return back.load();
  }));
  again.join();
  endpoint.close().get(soon());
  observer.endpoint.close().get(soon());
}

}  // namespace torch_iroh::testing
