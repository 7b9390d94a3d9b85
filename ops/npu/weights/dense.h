// SPDX-License-Identifier: Apache-2.0
// Weights of matrix products as graphs have them, read row by row.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "ops/nodes/node.h"

namespace flownpu::npu {

// A weight [K, N] of any type. read_row writes row k as floats: the weights of all N outputs for
// input k.
struct DenseWeight {
  std::int64_t inner = 0;    // K
  std::int64_t columns = 0;  // N
  std::function<void(std::int64_t k, std::span<float> row)> read_row = {};
};

// The shape of a value that may be absent; without axes if it is not known.
inline Shape shape_of(const Value* value) {
  return value != nullptr && value->shape ? *value->shape : Shape{};
}

// The weight of a DenseMatMul or Q4NXMatMul. Throws Error, which names the node, unless the weight
// is an initializer of a type of these operators.
DenseWeight read_dense_weight(const Node& product);

// The weight [N, C, p, p] of a convolution whose kernel is its stride, as the weight of a product
// with patches of C p p values each. Throws Error as read_dense_weight() does.
DenseWeight read_patch_weight(const Node& convolution);

// Writes a weight in bf16 as GEMM reads it, panels(K, N) (aie/kernels/README.md); K is padded to
// `rows`, and elements that the weight lacks are zeros.
void write_panels(const DenseWeight& weight, std::int64_t rows, std::span<std::byte> panels);
// Writes row k of such panels.
void write_panel_row(std::span<const float> row, std::int64_t k, std::int64_t rows,
                     std::span<std::byte> panels);

// The initializer at an input, which must be float and of this shape. Throws Error that says so.
const float* float_constant(const Node& node, std::size_t input, const Shape& shape);

}  // namespace flownpu::npu
