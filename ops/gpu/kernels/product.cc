// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/kernels/product.h"

#include "ops/error.h"

namespace flownpu::gpu {

std::int64_t parts_of(const ProductShape& shape) { return shape.gating == Gating::kNone ? 1 : 2; }

TensorDescription weight_of(const ProductShape& shape) {
  return {
      .name = "w",
      .element = Element::kQ4NX,
      .sizes = {parts_of(shape) * q4nx::row_blocks(shape.rows) * q4nx::kBlockRows, shape.columns},
      .layout = shape.layout,
      .storage = shape.storage};
}

TensorDescription result_of(const ProductShape& shape) {
  return {.name = "y",
          .element = shape.result,
          .access = Access::kWrite,
          .sizes = {std::string("tokens"), shape.rows}};
}

void link_addends(const ProductShape& shape, KernelDescription& kernel) {
  if (shape.factor != 1) {
    kernel.constants["factor"] = shape.factor;
    kernel.links["y"].push_back({.code = "value *= args.factor;"});
  }
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
    case Gating::kSwiGlu:  // sigmoid by tanh, since exp would overflow
      return "0.5f * " + gate + " * (1.0f + tanh(0.5f * " + gate + ")) * " + up;
    case Gating::kNone:
      break;
  }
  return gate;
}

std::vector<Storage> storages_for(GpuWeights wanted, std::size_t bytes, const DeviceFacts& facts) {
  if (wanted == GpuWeights::kBuffer) return {Storage::kBuffer};
  const bool can = facts.can_be_image(bytes);
  if (wanted == GpuWeights::kImage) {
    if (can) return {Storage::kImage};
    fail("[FlowNPU] device 'gpu': expected images of memory of ", bytes,
         " bytes, which gpu_weights = image asks for, got at most ", facts.texels, " texels of ",
         DeviceFacts::kTexelBytes, " bytes on ", facts.title(), ": use gpu_weights = buffer");
  }
  return can ? std::vector{Storage::kBuffer, Storage::kImage} : std::vector{Storage::kBuffer};
}

}  // namespace flownpu::gpu
