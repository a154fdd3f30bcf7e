// Codecs on Python buffers: what they make of an array. For looking at them, and for their tests.
#include "codec/codec.hpp"

#include <pybind11/numpy.h>

#include <span>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "codec/frame.hpp"
#include "codec/parameters.hpp"
#include "python/module.hpp"

namespace py = pybind11;

namespace torch_iroh::python {
namespace {

// Of any shape; not converted, so that nothing is rounded before the codec does it.
std::span<const float> floats_of(const py::buffer_info& info) {
  py::ssize_t expected = info.itemsize;
  for (py::ssize_t axis = info.ndim - 1; axis >= 0; expected *= info.shape[static_cast<std::size_t>(axis--)]) {
    if (info.size != 0 && info.strides[static_cast<std::size_t>(axis)] != expected) {
      throw Error(ErrorKind::invalid, "codec: values must be contiguous");
    }
  }
  if (info.format != py::format_descriptor<float>::format()) {
    throw Error(ErrorKind::invalid, "codec: values must be float32, not of format '" + info.format + "'");
  }
  return {static_cast<const float*>(info.ptr), static_cast<std::size_t>(info.size)};
}

py::bytes encode(const std::string& spec, const py::buffer& values, std::uint64_t seed) {
  const codec::Codec codec = codec::parse(spec);
  const py::buffer_info info = values.request();
  const std::span<const float> floats = floats_of(info);
  const std::size_t size = codec::frame_bytes(codec, floats.size());
  auto frame = py::reinterpret_steal<py::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<py::ssize_t>(size)));
  if (!frame) throw py::error_already_set();
  auto* out = reinterpret_cast<std::byte*>(PyBytes_AsString(frame.ptr()));
  const py::gil_scoped_release release;
  codec::encode(codec, floats, seed, {out, size});
  return frame;
}

py::array_t<float> decode(const std::string& spec, const py::bytes& frame, std::uint64_t count) {
  const codec::Codec codec = codec::parse(spec);
  const auto bytes = std::as_bytes(std::span(static_cast<std::string_view>(frame)));
  // Before an array of `count` is made: a wrong count must not cost memory.
  const std::size_t size = codec::frame_bytes(codec, count);
  if (bytes.size() != size) codec::check_frame(codec, count, size, bytes);
  py::array_t<float> values(static_cast<py::ssize_t>(count));
  const std::span<float> out(values.mutable_data(), count);
  const py::gil_scoped_release release;
  codec::decode(codec, bytes, out);
  return values;
}

}  // namespace

void bind_codec(py::module_& module) {
  module.def("codec_names", [] {
    std::vector<std::string> names;
    for (int kind = 0; kind <= static_cast<int>(codec::kLastKind); ++kind) {
      names.emplace_back(codec::name_of(static_cast<codec::Kind>(kind)));
    }
    return names;
  });
  module.def("codec_text", [](const std::string& spec) { return codec::to_string(codec::parse(spec)); });
  module.def(
      "codec_frame_bytes",
      [](const std::string& spec, std::uint64_t count) { return codec::frame_bytes(codec::parse(spec), count); },
      py::arg("spec"), py::arg("count"));
  module.def("codec_encode", &encode, py::arg("spec"), py::arg("values"), py::arg("seed") = 0);
  module.def("codec_decode", &decode, py::arg("spec"), py::arg("frame"), py::arg("count"));
}

}  // namespace torch_iroh::python
