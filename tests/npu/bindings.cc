// SPDX-License-Identifier: Apache-2.0
#include "tests/npu/bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/formats/crc32.h"
#include "ops/npu/artifacts/call_family.h"
#include "ops/npu/artifacts/index.h"
#include "ops/npu/driver/runtime.h"
#include "ops/npu/driver/runtimes.h"

namespace nb = nanobind;
using namespace flownpu::npu;  // NOLINT(google-build-using-namespace): the module is its face

namespace {

using Words = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;
// buffer, offset, bytes
using CallArgument = std::tuple<Buffer*, std::size_t, std::size_t>;
// name, sequence, arguments
using GivenCall = std::tuple<std::string, Sequence*, std::vector<CallArgument>>;

std::span<const std::int64_t> span(const Words& words) { return {words.data(), words.size()}; }

// Raises Python's DeviceError, whose `failure` is the name of the error's kind.
void raise_device_error(const std::exception_ptr& error, void* type) {
  constexpr std::array kNames{"no_device", "permission", "version", "artifact", "memory",
                              "submit",    "command",    "timeout", "forked"};
  try {
    std::rethrow_exception(error);
  } catch (const DeviceError& e) {
    const nb::object raised = nb::handle(static_cast<PyObject*>(type))(e.what());
    raised.attr("failure") = kNames[static_cast<std::size_t>(e.failure())];
    PyErr_SetObject(static_cast<PyObject*>(type), raised.ptr());
  }
}

void run(Runtime& runtime, Array& array, const std::vector<GivenCall>& given, int limit) {
  std::vector<std::vector<View>> views;
  for (const auto& [name, sequence, arguments] : given) {
    views.emplace_back();
    for (const auto& [buffer, offset, bytes] : arguments)
      views.back().push_back({buffer, offset, bytes});
  }
  std::vector<Call> calls;
  for (std::size_t i = 0; i < given.size(); ++i)
    calls.push_back({std::get<0>(given[i]), std::get<1>(given[i]), views[i]});
  const nb::gil_scoped_release released;
  runtime.run(array, calls, std::chrono::milliseconds(limit));
}

std::map<std::string, std::uint64_t> counts(const Runtime& runtime) {
  const Counts counts = runtime.counts();
  return {{"dispatches", counts.dispatches},           {"calls", counts.calls},
          {"bytes_to_device", counts.bytes_to_device}, {"bytes_to_host", counts.bytes_to_host},
          {"word_bytes", counts.word_bytes},           {"buffer_bytes", counts.buffer_bytes}};
}

void bind_artifacts(nb::module_& module) {
  nb::class_<CallFamily>(module, "CallFamily")
      .def_static("read", [](const Words& words) { return CallFamily::read(span(words)); })
      .def_prop_ro("name", &CallFamily::name)
      .def_prop_ro("positions", &CallFamily::positions)
      .def("class_of", &CallFamily::class_of)
      // All words of a position: its class's, patched with those that depend on the position.
      .def("words",
           [](const CallFamily& family, std::int64_t position) {
             std::vector<std::int64_t> words = family.at(family.class_of(position)).words;
             family.patch(position, [&](std::size_t w, std::int64_t value) { words[w] = value; });
             return words;
           })
      .def("patch", [](const CallFamily& family, std::int64_t position) {
        std::vector<std::pair<std::size_t, std::int64_t>> patches;
        family.patch(position, [&](std::size_t word, std::int64_t value) {
          patches.emplace_back(word, value);
        });
        return patches;
      });
  nb::class_<CallRecord>(module, "CallRecord")
      .def_ro("op_type", &CallRecord::op_type)
      .def_ro("name", &CallRecord::name)
      .def_ro("array", &CallRecord::array)
      .def_prop_ro("buffers", [](const CallRecord& call) {
        std::vector<std::pair<std::string, std::size_t>> buffers;
        for (const BufferRecord& buffer : call.buffers)
          buffers.emplace_back(buffer.name, buffer.bytes);
        return buffers;
      });
  nb::class_<ProgramRecord>(module, "ProgramRecord")
      .def_ro("kind", &ProgramRecord::kind)
      .def_ro("tokens", &ProgramRecord::tokens)
      .def_ro("context", &ProgramRecord::context)
      // name, bytes
      .def_prop_ro("buffers",
                   [](const ProgramRecord& program) {
                     std::vector<std::pair<std::string, std::size_t>> buffers;
                     for (const ProgramBuffer& buffer : program.buffers)
                       buffers.emplace_back(buffer.name, buffer.bytes);
                     return buffers;
                   })
      // for each dispatch, each step's number of its call and label
      .def_prop_ro("dispatches", [](const ProgramRecord& program) {
        std::vector<std::vector<std::pair<std::size_t, std::string>>> dispatches;
        for (const DispatchRecord& dispatch : program.dispatches) {
          dispatches.emplace_back();
          for (const StepRecord& step : dispatch.steps)
            dispatches.back().emplace_back(step.call, step.label);
        }
        return dispatches;
      });
  nb::class_<Artifacts>(module, "Artifacts")
      .def(nb::init<std::string, bool>(), nb::arg("folder"), nb::arg("emulated") = true)
      .def_prop_ro("target", &Artifacts::target)
      .def_prop_ro("emulated", &Artifacts::emulated)
      .def_prop_ro("identity", &Artifacts::identity)
      .def("call", &Artifacts::call, nb::rv_policy::reference_internal)
      .def("programs", &Artifacts::programs, nb::rv_policy::reference_internal)
      .def("require", &Artifacts::require, nb::rv_policy::reference_internal)
      .def("array_file", &Artifacts::array_file)
      .def("family", &Artifacts::family);
}

void bind_runtime(nb::module_& module) {
  nb::class_<Buffer>(module, "Buffer")
      // The host's copy.
      .def("bytes",
           [](Buffer& buffer) {
             const std::span<std::byte> bytes = buffer.bytes();
             return Bytes(bytes.data(), {bytes.size()}, nb::find(buffer));
           })
      .def("to_device", &Buffer::to_device, nb::arg("offset"), nb::arg("bytes"))
      .def("to_host", &Buffer::to_host, nb::arg("offset"), nb::arg("bytes"));
  nb::class_<Sequence>(module, "Sequence").def("write", &Sequence::write);
  nb::class_<Array>(module, "Array")
      .def(
          "sequence", [](Array& array, const Words& words) { return array.sequence(span(words)); },
          nb::keep_alive<0, 1>());
  nb::class_<Runtime>(module, "Runtime")
      .def_prop_ro("description", &Runtime::description)
      .def("load", &Runtime::load)
      .def("allocate", &Runtime::allocate)
      .def("run", run)
      .def("counts", counts);
  module.def("open_emulated_runtime", open_emulated_runtime, nb::arg("target"),
             nb::arg("kernels") = "");
  module.def("open_xrt_runtime", open_xrt_runtime, nb::arg("plugin") = "");
}

}  // namespace

void bind_npu_runtime(nb::module_& module) {
  // Python's own class, so that an instance can carry `failure`.
  const nb::object type =
      nb::steal(PyErr_NewException("flownpu_testing.npu.DeviceError", PyExc_RuntimeError, nullptr));
  module.attr("DeviceError") = type;
  nb::register_exception_translator(raise_device_error, type.ptr());
  module.def("crc32", [](const nb::bytes& data) {
    return flownpu::crc32({static_cast<const std::byte*>(data.data()), data.size()});
  });
  bind_artifacts(module);
  bind_runtime(module);
}
