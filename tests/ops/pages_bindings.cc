// SPDX-License-Identifier: Apache-2.0
// flownpu_testing.interleave() and ask_for_large_pages(): requests to the system about pages.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ops/system/memory.h"
#include "ops/system/nodes.h"
#include "tests/ops/bindings.h"

namespace nb = nanobind;

namespace {

using Bytes = nb::ndarray<const std::uint8_t, nb::c_contig>;

std::span<const std::byte> span(const Bytes& array) {
  return {reinterpret_cast<const std::byte*>(array.data()), array.size()};
}

}  // namespace

void bind_pages(nb::module_& module) {
  module.def(
      "interleave",
      [](const Bytes& pages, const std::vector<int>& nodes) {
        flownpu::interleave(span(pages), nodes);
      },
      nb::arg("pages"), nb::arg("nodes"));
  module.def(
      "interleave_file",
      [](const Bytes& pages, const std::vector<int>& nodes) {
        flownpu::interleave_file(span(pages), nodes);
      },
      nb::arg("pages"), nb::arg("nodes"));
  module.def(
      "ask_for_large_pages",
      [](const Bytes& memory) { flownpu::ask_for_large_pages(span(memory)); }, nb::arg("memory"));
}
