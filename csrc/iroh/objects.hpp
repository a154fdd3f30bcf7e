// The foreign handle inside each public class. Private to csrc/iroh.
#pragma once

#include "iroh/endpoint.hpp"
#include "iroh/handle.hpp"

namespace torch_iroh::iroh {

struct SendStream::Impl {
  Handle<&abi::Functions::sendstream> handle;
};
struct RecvStream::Impl {
  Handle<&abi::Functions::recvstream> handle;
};
struct Connection::Impl {
  Handle<&abi::Functions::connection> handle;
};
struct Incoming::Impl {
  Handle<&abi::Functions::incoming> handle;
};
struct Accepting::Impl {
  Handle<&abi::Functions::accepting> handle;
};
struct Endpoint::Impl {
  Handle<&abi::Functions::endpoint> handle;
};

// Wraps a handle that iroh returned: Public is one of the classes above.
template <typename Public>
Public adopt(abi::Handle handle) {
  using Impl = typename Public::Impl;
  return Public(std::make_shared<Impl>(Impl{decltype(Impl::handle)(handle)}));
}

EndpointId lift_id(abi::Handle endpoint_id);

}  // namespace torch_iroh::iroh
