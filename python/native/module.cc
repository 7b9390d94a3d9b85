// SPDX-License-Identifier: Apache-2.0
// flownpu._native: FlowNPU's C++ for Python. An Error is raised as a ValueError with the same
// message.
#include <nanobind/nanobind.h>

#include "ops/error.h"
#include "python/native/bindings.h"

namespace nb = nanobind;

NB_MODULE(_native, module) {
  nb::set_leak_warnings(false);  // Python code may keep objects until the process ends.
  nb::register_exception_translator([](const std::exception_ptr& pointer, void* /*payload*/) {
    try {
      std::rethrow_exception(pointer);
    } catch (const flownpu::Error& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    }
  });
  flownpu::native::bind_contracts(module);
  flownpu::native::bind_graph(module);
  flownpu::native::bind_quantise(module);
  flownpu::native::bind_describe(module);
  flownpu::native::bind_operators(module);
  flownpu::native::bind_gpu(module);
  flownpu::native::bind_emulator(module);
  flownpu::native::bind_programs(module);
  flownpu::native::bind_limits(module);
  flownpu::native::bind_stage_prices(module);
}
