// The observer and those who ask it, over the real library: it says the address it sees, to as many as it may.
#include "link/observer.hpp"

#include "iroh_support.hpp"
#include "link/reach.hpp"

namespace torch_iroh::testing {

TEST_CASE("observer: a peer learns its own address from it, and those beyond the limit are sent away") {
  if (!have_library()) return;
  const auto observer = std::make_shared<link::Observer>(link::ObserverOptions{"127.0.0.1:0", iroh::SecretKey{}, 1});
  observer->start();
  const std::string text = iroh::to_hex(observer->id()) + "@" + observer->bound_sockets().front();
  const iroh::Endpoint endpoint = bind_loopback();
  auto reach = std::make_shared<link::Reach>(endpoint, link::ReachOptions{{}, false, {text}});
  reach->start(soon());
  REQUIRE(reach->observed().size() == 1);
  // Nothing translates addresses here, so the observer sees the socket's own.
  CHECK(reach->observed().front() == endpoint.bound_sockets().front());
  CHECK(observer->connections() == 1);

  const iroh::Endpoint other = bind_loopback();
  iroh::EndpointAddr addr;
  addr.id = observer->id();
  addr.direct = {observer->bound_sockets().front()};
  const auto refused = other.connect(addr, link::kObserveAlpn).get(soon());
  CHECK(contains(refused.closed().get(soon()), "full"));

  // Peers may send it nothing.
  reach.reset();
  CHECK(eventually([&] { return observer->connections() == 0; }));
  const auto let_in = other.connect(addr, link::kObserveAlpn).get(soon());
  CHECK(eventually([&] { return observer->answers() == 2; }));
  iroh::SendStream stream = let_in.open_uni().get(soon());
  stream.write_all(std::as_bytes(std::span("take this"))).get(soon());
  CHECK(contains(let_in.closed().get(soon()), "takes nothing"));

  observer->close();
  endpoint.close().get(soon());
  other.close().get(soon());
}

}  // namespace torch_iroh::testing
