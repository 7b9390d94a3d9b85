// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/kernels/product.h"

namespace flownpu::gpu {

std::int64_t parts_of(const ProductShape& shape) { return shape.gating == Gating::kNone ? 1 : 2; }

TensorDescription weight_of(const ProductShape& shape) {
  return {
      .name = "w",
      .element = Element::kQ4NX,
      .sizes = {parts_of(shape) * q4nx::row_blocks(shape.rows) * q4nx::kBlockRows, shape.columns},
      .layout = shape.layout};
}

TensorDescription result_of(const ProductShape& shape) {
  return {.name = "y",
          .element = shape.result,
          .access = Access::kWrite,
          .sizes = {std::string("tokens"), shape.rows}};
}

void link_addends(const ProductShape& shape, KernelDescription& kernel) {
  if (shape.has_bias) {
    kernel.links["y"].push_back({.code = "value += args.bias.Read(at1);",
                                 .tensors = {{.name = "bias", .sizes = {shape.rows}}}});
  }
  if (shape.has_residual) {
    kernel.links["y"].push_back(
        {.code = "value += args.residual.Read(at);",
         .tensors = {{.name = "residual", .sizes = {std::string("tokens"), shape.rows}}}});
  }
}

std::string gated(const ProductShape& shape, const std::string& gate, const std::string& up) {
  switch (shape.gating) {
    case Gating::kGeGlu:  // sqrt(2 / pi) = 0.79788456
      return "0.5f * " + gate + " * (1.0f + tanh(0.79788456f * (" + gate + " + 0.044715f * " +
             gate + " * " + gate + " * " + gate + "))) * " + up;
    case Gating::kSwiGlu:  // exp would overflow
      return "0.5f * " + gate + " * (1.0f + tanh(0.5f * " + gate + ")) * " + up;
    case Gating::kNone:
      break;
  }
  return gate;
}

}  // namespace flownpu::gpu
