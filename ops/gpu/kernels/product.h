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
// Appends the experts' tensors, if the shape has any: `choices`, then their bias.
void add_experts(const ProductShape& shape, std::vector<TensorDescription> choices,
                 KernelDescription& kernel);
// Replaces a kernel's words for where its rows of x and y and its weight are: BLOCKS, the first row
// of blocks of an expert; and of a tile of `tile` tokens, FIRST (declarations), GROUPS, the number
// of groups, TOKEN_OF(i), the row of x of the tile's token i, WITHIN(i), whether there is such a
// token, and PLACE_OF(i), its row of y.
std::string in_tiles(const ProductShape& shape, std::int64_t tile, std::string text);
// The expression of the result: gate, or with gating activation(gate) * up; both are expressions.
std::string gated(const ProductShape& shape, const std::string& gate, const std::string& up);

}  // namespace flownpu::gpu
