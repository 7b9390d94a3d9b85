// SPDX-License-Identifier: Apache-2.0
// What kernels of products share: the tensors around them, and what becomes of a product.
#pragma once

#include <string>
#include <vector>

#include "ops/gpu/kernels/kernels.h"

namespace flownpu::gpu {

// The weight, and y, whose links add bias and residual.
TensorDescription weight_of(const ProductShape& shape);
TensorDescription result_of(const ProductShape& shape);
void link_addends(const ProductShape& shape, KernelDescription& kernel);
// Products that a lane computes side by side: gate and up, or one; rows of blocks of each.
std::int64_t parts_of(const ProductShape& shape);
// The expression of what is written, of products product[0] and, with gating, product[1].
std::string gated(const ProductShape& shape, const std::string& gate, const std::string& up);

}  // namespace flownpu::gpu
