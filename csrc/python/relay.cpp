// The relay's hub for the server that Python runs: one call per buffer that a socket gave, none per packet.
#include <algorithm>

#include "base/error.hpp"
#include "python/module.hpp"
#include "relay/hub.hpp"

namespace py = pybind11;

namespace torch_iroh::python {
namespace {

relay::View view_of(const py::buffer_info& info) {
  return {static_cast<const std::byte*>(info.ptr), static_cast<std::size_t>(info.size * info.itemsize)};
}

relay::Key to_key(const py::bytes& bytes) {
  const std::string_view view = bytes;
  relay::Key key{};
  if (view.size() != key.size()) throw Error(ErrorKind::invalid, "an endpoint id has 32 bytes");
  std::copy_n(reinterpret_cast<const std::byte*>(view.data()), key.size(), key.data());
  return key;
}

// (what the client said to prove who it is, or none; whether it is to be closed; what it did wrong, or "")
py::tuple feed(relay::Hub& hub, relay::ClientId client, const py::buffer& bytes) {
  const py::buffer_info info = bytes.request();
  const relay::Fed fed = hub.feed(client, view_of(info));
  py::object hello = py::none();
  if (fed.hello) hello = py::bytes(reinterpret_cast<const char*>(fed.hello->data()), fed.hello->size());
  return py::make_tuple(hello, fed.leaves, fed.violation);
}

py::bytes take(relay::Hub& hub, relay::ClientId client, std::size_t limit) {
  const std::size_t size = hub.next_size(client, limit);
  PyObject* bytes = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
  if (bytes == nullptr) throw py::error_already_set();
  if (size > 0) hub.take_into(client, reinterpret_cast<std::byte*>(PyBytes_AS_STRING(bytes)), size);
  return py::reinterpret_steal<py::bytes>(bytes);
}

py::dict counters(const relay::Hub& hub) {
  const relay::Counters& all = hub.counters();
  py::dict dict;
  dict["received_bytes"] = all.received_bytes;
  dict["sent_bytes"] = all.sent_bytes;
  dict["relayed_frames"] = all.relayed_frames;
  dict["relayed_bytes"] = all.relayed_bytes;
  dict["dropped_slow_frames"] = all.dropped_slow_frames;
  dict["dropped_slow_bytes"] = all.dropped_slow_bytes;
  dict["dropped_unknown_frames"] = all.dropped_unknown_frames;
  dict["gone_notices"] = all.gone_notices;
  dict["replaced"] = all.replaced;
  dict["clients"] = hub.clients();
  dict["endpoints"] = hub.endpoints();
  dict["queued_bytes"] = hub.queued_bytes();
  return dict;
}

}  // namespace

void bind_relay(py::module_& module) {
  py::class_<relay::Hub>(module, "RelayHub")
      .def(py::init<std::size_t, std::uint64_t>(), py::arg("queue_bytes"), py::arg("seed"))
      .def("open", &relay::Hub::open)
      .def(
          "confirm",
          [](relay::Hub& hub, relay::ClientId client, const py::bytes& key) {
            return hub.confirm(client, to_key(key));
          },
          py::arg("client"), py::arg("key"))
      .def("close", &relay::Hub::close, py::arg("client"))
      .def("feed", &feed, py::arg("client"), py::arg("bytes"))
      .def(
          "send",
          [](relay::Hub& hub, relay::ClientId client, int type, const py::buffer& body) {
            hub.send(client, static_cast<relay::Type>(type), view_of(body.request()));
          },
          py::arg("client"), py::arg("type"), py::arg("body"))
      .def("send_close", &relay::Hub::send_close, py::arg("client"), py::arg("code"))
      .def(
          "adapt",
          [](relay::Hub& hub, double seconds) {
            hub.adapt(std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds)));
          },
          py::arg("seconds"))
      .def("take_ready", &relay::Hub::take_ready)
      .def("take", &take, py::arg("client"), py::arg("limit"))
      .def("counters", &counters);
}

}  // namespace torch_iroh::python
