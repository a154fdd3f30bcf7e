// The observer for the relay's command. It answers on the core's own threads; Python starts and ends it.
#include "link/observer.hpp"

#include "python/module.hpp"

namespace py = pybind11;

namespace torch_iroh::python {

void bind_observer(py::module_& module) {
  using link::Observer;
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<Observer, std::shared_ptr<Observer>>(module, "Observer")
      .def(py::init([](const std::string& bind, const py::bytes& secret_key, std::size_t most_connections) {
             if (!iroh::is_socket_address(bind)) {
               throw Error(ErrorKind::invalid, "the observer's address is '" + bind + "'; allowed: ip:port");
             }
             auto observer = std::make_shared<Observer>(
                 link::ObserverOptions{bind, iroh::secret_key_of(std::string_view(secret_key)), most_connections});
             const py::gil_scoped_release release;
             observer->start();
             return observer;
           }),
           py::arg("bind"), py::arg("secret_key"), py::arg("most_connections"))
      .def("id", [](const Observer& observer) { return iroh::to_hex(observer.id()); })
      .def("bound_sockets", &Observer::bound_sockets)
      .def("connections", &Observer::connections)
      .def("answers", &Observer::answers)
      .def("close", &Observer::close, Release());
}

}  // namespace torch_iroh::python
