// The Python module torch_iroh._core: the core without torch. Blocking calls release the GIL.
#include "python/module.hpp"

#include "iroh/library.hpp"
#include "link/node.hpp"

namespace py = pybind11;

namespace torch_iroh::python {

PYBIND11_MODULE(_core, module) {
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      PyObject* type = PyExc_RuntimeError;
      if (error.kind() == ErrorKind::invalid) type = PyExc_ValueError;
      if (error.kind() == ErrorKind::timeout) type = PyExc_TimeoutError;
      py::set_error(type, error.what());
    }
  });
  module.def("open_library", &iroh::Library::open, py::arg("path"), py::arg("installed_version"));
  module.def("leave_all_groups", &link::Node::leave_all, py::call_guard<py::gil_scoped_release>());
  bind_in_process(module);
  bind_endpoint(module);
  bind_plan(module);
  bind_codec(module);
  bind_relay(module);
  bind_observer(module);
}

}  // namespace torch_iroh::python
