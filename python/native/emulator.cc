// SPDX-License-Identifier: Apache-2.0
// Binds the emulator of the NPU's array; aie/emulator/emulator.py is its interface for Python code.
#include "aie/emulator/emulator.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "python/native/bindings.h"

namespace nb = nanobind;
using namespace flownpu::emulator;  // NOLINT(google-build-using-namespace): the module is its face

namespace {

using Words = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using View = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;

std::span<const std::int64_t> span(const Words& words) { return {words.data(), words.size()}; }

// A kernel that calls a Python function, with arrays of bytes and integers as arguments.
KernelCall from_python(const KernelRecord& record, nb::object function) {
  return [&record,
          function = std::move(function)](std::span<const flownpu::aie_host::Argument> arguments) {
    nb::list given;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      if (record.arguments[i] == 0) {
        given.append(arguments[i].value);
      } else {
        given.append(View(arguments[i].data, {arguments[i].bytes}, nb::handle())
                         .cast(nb::rv_policy::reference));
      }
    }
    function(*given);
  };
}

class PythonEmulator {
 public:
  // Kernels are looked up in `functions` first, by name, then in the shared library `library`,
  // which may be "".
  PythonEmulator(const Words& words, const std::string& library, const nb::dict& functions)
      : functions_(functions), emulator_(read_array(span(words)), [&](const KernelRecord& record) {
          if (functions_.contains(record.entry.c_str())) {
            return from_python(record, functions_[record.entry.c_str()]);
          }
          if (library.empty())
            throw flownpu::emulator::Error("[emulator] there is no kernel " + record.entry);
          return kernels_of(load_kernels(library))(record);
        }) {}

  void run(const Words& words, const std::vector<Bytes>& buffers, std::uint64_t seed, bool settle,
           const std::string& last) {
    std::vector<std::span<std::byte>> spans;
    spans.reserve(buffers.size());
    for (const Bytes& buffer : buffers) {
      spans.emplace_back(reinterpret_cast<std::byte*>(buffer.data()), buffer.size());
    }
    sequence_ = read_sequence(span(words));
    emulator_.run(sequence_, spans, {.seed = seed, .settle = settle, .last = last});
  }

  // ({channel: number of words}, {kernel: number of calls}).
  [[nodiscard]] nb::tuple counts() const {
    const Counts counts = emulator_.counts();
    return nb::make_tuple(counts.words, counts.calls);
  }
  void reset_counts() { emulator_.reset_counts(); }
  [[nodiscard]] std::vector<std::string> leftovers() const { return emulator_.leftovers(); }

 private:
  nb::dict functions_;
  Sequence sequence_;
  Emulator emulator_;
};

}  // namespace

namespace flownpu::native {

void bind_emulator(nb::module_& module) {
  const nb::exception<emulator::Error> error(module, "EmulationError", PyExc_RuntimeError);
  [[maybe_unused]] const nb::exception<Deadlock> deadlock(module, "Deadlock", error.ptr());
  nb::class_<PythonEmulator>(module, "Emulator", "An array whose state lasts from call to call.")
      .def(nb::init<const Words&, const std::string&, const nb::dict&>(), nb::arg("words"),
           nb::arg("library"), nb::arg("functions"))
      .def("run", &PythonEmulator::run, nb::arg("words"), nb::arg("buffers"), nb::arg("seed"),
           nb::arg("settle"), nb::arg("last"))
      .def("counts", &PythonEmulator::counts)
      .def("reset_counts", &PythonEmulator::reset_counts)
      .def("leftovers", &PythonEmulator::leftovers);
  module.def(
      "read_words",
      [](const std::string& path) {
        auto* words = new std::vector<std::int64_t>(read_words(path));
        const nb::capsule owner(words, [](void* data) noexcept {
          delete static_cast<std::vector<std::int64_t>*>(data);
        });
        return nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>(words->data(), {words->size()},
                                                                 owner);
      },
      nb::arg("path"));
}

}  // namespace flownpu::native
