// SPDX-License-Identifier: Apache-2.0
// Binds the quantisation of floats to codes, scales and minima
// (ops/lowering/weights/quantize_group.h).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <span>
#include <utility>

#include "ops/error.h"
#include "ops/lowering/weights/quantize_group.h"
#include "python/native/bindings.h"

namespace nb = nanobind;

namespace flownpu::native {
namespace {

template <typename T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Writes codes, and scale and minimum as the bits of bf16.
void quantise(const Matrix<const float>& weights, const Matrix<std::uint8_t>& codes,
              const Matrix<std::uint16_t>& scale, const Matrix<std::uint16_t>& minimum) {
  std::size_t rows = weights.shape(0);
  std::size_t columns = weights.shape(1);
  constexpr auto kGroup = static_cast<std::size_t>(q4nx::kGroup);
  std::size_t groups = (columns + kGroup - 1) / kGroup;
  for (const auto* parameter : {&scale, &minimum}) {
    if (codes.shape(0) != rows || codes.shape(1) != columns || parameter->shape(0) != rows ||
        parameter->shape(1) != groups) {
      fail("[quantise] expected codes [", rows, ", ", columns, "], scale and minimum [", rows, ", ",
           groups, "]");
    }
  }
  if (columns % kGroup == 0) {  // rows of whole groups are one long row
    columns *= std::exchange(rows, 1);
    groups = columns / kGroup;
  }
  const nb::gil_scoped_release released;
  std::array<lowering::Q4NXGroup, lowering::kGroupsAtOnce> found;
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t group = 0; group < groups;) {
      // Takes as many groups of equal size as possible: the last group of a row may be smaller.
      const std::size_t column = group * kGroup;
      const std::size_t size = std::min(kGroup, columns - column);
      const std::size_t count = std::min(found.size(), (columns - column) / size);
      const std::size_t at = row * columns + column;
      const std::span made(found.data(), count);
      lowering::quantize_groups({weights.data() + at, count * size}, size, made);
      for (std::size_t i = 0; i < count; ++i, ++group) {
        std::copy_n(made[i].codes.begin(), size, codes.data() + at + i * size);
        scale.data()[row * groups + group] = made[i].scale;
        minimum.data()[row * groups + group] = made[i].minimum;
      }
    }
  }
}

}  // namespace

void bind_quantise(nb::module_& module) {
  module.def("quantise", quantise, nb::arg("weights"), nb::arg("codes"), nb::arg("scale"),
             nb::arg("minimum"),
             "Quantises finite float32 weights [rows, columns]: writes codes, uint8 [rows, "
             "columns], and the bits of scale and minimum, uint16 [rows, groups of 32 columns].");
}

}  // namespace flownpu::native
