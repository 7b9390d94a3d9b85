// SPDX-License-Identifier: Apache-2.0
// DenseMatMul (ops/definitions/dense_matmul.py), and MatMul of two activations.
#include "ops/gpu/kernels/kernels.h"
#include "ops/gpu/kernels/pieces.h"

namespace flownpu::gpu {
namespace {

const char* activation_of(DenseActivation activation) {
  switch (activation) {
    case DenseActivation::kGelu:  // sqrt(1 / 2) = 0.70710678
      return "value = 0.5f * value * (1.0f + erf(0.70710678f * value));";
    case DenseActivation::kGeluTanh:  // sqrt(2 / pi) = 0.79788456
      return "value = 0.5f * value * (1.0f + tanh(0.79788456f * (value + 0.044715f * value * value "
             "* value)));";
    case DenseActivation::kNone:
      break;
  }
  return "";
}

}  // namespace

KernelDescription dense_matmul(const DenseShape& shape) {
  const std::string tokens = "tokens";
  std::vector<Size> of_weight{"columns", "rows"};
  if (shape.transposed) std::swap(of_weight[0], of_weight[1]);
  KernelDescription kernel{
      .name = "dense_matmul",
      .tensors = {{.name = "x", .element = shape.given, .sizes = {tokens, "columns"}},
                  {.name = "w", .element = shape.weight, .sizes = of_weight},
                  {.name = "y",
                   .element = shape.given,
                   .access = Access::kWrite,
                   .sizes = {tokens, "rows"}}},
      .parameters = {tokens, "rows", "columns"}};
  fill_tiled_product({.rows = "args.tokens",
                      .depth = "args.columns",
                      .columns = "args.rows",
                      .left = "element = args.x.Read(row, k);",
                      .right = shape.transposed ? "element = args.w.Read(column, k);"
                                                : "element = args.w.Read(k, column);",
                      .right_along = shape.transposed ? ReadAlong::kDepth : ReadAlong::kColumns,
                      .write = "args.y.Write(sum, row, column);"},
                     kernel);
  std::vector<Link>& links = kernel.links["y"];
  if (shape.has_scale)
    links.push_back({.code = "value *= args.scale.Read(at1);",
                     .tensors = {{.name = "scale", .sizes = {"rows"}}}});
  if (shape.has_bias)
    links.push_back({.code = "value += args.bias.Read(at1);",
                     .tensors = {{.name = "bias", .element = shape.given, .sizes = {"rows"}}}});
  if (const std::string code = activation_of(shape.activation); !code.empty())
    links.push_back({.code = code});
  if (shape.has_residual) {
    links.push_back(
        {.code = "value += args.residual.Read(at0 % args.residual_rows, at1);",
         .tensors = {{.name = "residual", .element = shape.given, .sizes = {tokens, "rows"}}}});
    kernel.parameters.push_back("residual_rows");
  }
  return kernel;
}

Grid dense_matmul_grid(const DenseShape& shape, std::int64_t tokens) {
  return tiled_product_grid(tokens, shape.rows);
}

KernelDescription activations_matmul(Element element) {
  const std::string batches = "batches";
  KernelDescription kernel{
      .name = "activations_matmul",
      .tensors = {{.name = "a", .element = element, .sizes = {batches, "rows", "depth"}},
                  {.name = "b", .element = element, .sizes = {batches, "depth", "columns"}},
                  {.name = "y",
                   .element = element,
                   .access = Access::kWrite,
                   .sizes = {batches, "rows", "columns"}}},
      .parameters = {"rows", "depth", "columns", "batches_a", "batches_b"}};
  fill_tiled_product({.rows = "args.rows",
                      .depth = "args.depth",
                      .columns = "args.columns",
                      .left = "element = args.a.Read(group(2) % args.batches_a, row, k);",
                      .right = "element = args.b.Read(group(2) % args.batches_b, k, column);",
                      .write = "args.y.Write(sum, group(2), row, column);"},
                     kernel);
  return kernel;
}

Grid activations_matmul_grid(std::int64_t rows, std::int64_t columns, std::int64_t batches) {
  return tiled_product_grid(rows, columns, batches);
}

}  // namespace flownpu::gpu
