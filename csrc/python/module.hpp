// The parts of torch_iroh._core, one per source file.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace torch_iroh::python {

void bind_in_process(pybind11::module_& module);
void bind_endpoint(pybind11::module_& module);
void bind_plan(pybind11::module_& module);
void bind_codec(pybind11::module_& module);
void bind_relay(pybind11::module_& module);
void bind_observer(pybind11::module_& module);

}  // namespace torch_iroh::python
