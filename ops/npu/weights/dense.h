// SPDX-License-Identifier: Apache-2.0
// Weights of matrix products as graphs have them, read a row at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "ops/nodes/node.h"

namespace flownpu::npu {

// A weight [K, N] of whatever type: writes row k, the weights of all N outputs for input k.
struct DenseWeight {
  std::int64_t inner = 0;    // K
  std::int64_t columns = 0;  // N
  std::function<void(std::int64_t k, std::span<float> row)> read_row = {};
};

// Shape of a value that may be absent; no axes if it is not known.
inline Shape shape_of(const Value* value) {
  return value != nullptr && value->shape ? *value->shape : Shape{};
}

// The weight of a DenseMatMul or Q4NXMatMul. Throws Error that names the node if it is no
// initializer of a type that these have.
DenseWeight read_dense_weight(const Node& product);

// The weight [N, C, p, p] of a convolution whose kernel is its stride, as that of the product with
// patches of C p p values.
DenseWeight read_patch_weight(const Node& convolution);

// A weight in bf16 as GEMM reads it, panels(K, N) (aie/kernels/README.md), K as padded to `rows`;
// zeros where it has nothing.
void write_panels(const DenseWeight& weight, std::int64_t rows, std::span<std::byte> panels);
// Row k of such panels.
void write_panel_row(std::span<const float> row, std::int64_t k, std::int64_t rows,
                     std::span<std::byte> panels);

// The initializer at an input, float of this shape. Throws Error that says what was expected.
const float* float_constant(const Node& node, std::size_t input, const Shape& shape);

}  // namespace flownpu::npu
