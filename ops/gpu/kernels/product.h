// SPDX-License-Identifier: Apache-2.0
// Parts of all kernels of products: descriptions of their tensors, and the code behind a product.
#pragma once

#include <string>
#include <vector>

#include "ops/gpu/kernels/kernels.h"

namespace flownpu::gpu {

// Descriptions of the weight and of y. link_addends() links the factor and the addition of bias and
// residual to y.
TensorDescription weight_of(const ProductShape& shape);
TensorDescription result_of(const ProductShape& shape);
void link_addends(const ProductShape& shape, KernelDescription& kernel);
// How many products a lane computes side by side: 2 with gating (gate and up), else 1. The weight
// has as many parts.
std::int64_t parts_of(const ProductShape& shape);
// The expression of the result: gate, or with gating activation(gate) * up; both are expressions.
std::string gated(const ProductShape& shape, const std::string& gate, const std::string& up);

}  // namespace flownpu::gpu
