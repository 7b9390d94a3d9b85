// SPDX-License-Identifier: Apache-2.0
// DenseMatMul (ops/definitions/dense_matmul.py): a work-group computes 64 columns of the result for
// each of 16 rows. It reads 16 columns of X and the rows of W for them at a time into its own
// memory. A lane has one column of the result, and a sum for each row.
#include "ops/gpu/kernels/kernels.h"

namespace flownpu::gpu {
namespace {

constexpr std::int64_t kLanes = 64;
constexpr std::int64_t kTileRows = 16;  // rows of a work-group
constexpr std::int64_t kStep = 16;      // columns of X at a time

// WEIGHT is the weight of column `from` of X for column `m` of the result; K_OF and M_OF are the
// places of both in what the work-group reads at a time.
constexpr const char* kBody = R"(
  const int first = group(1) * args.tile;
  const int column = group(0) * args.lanes + lane();
  shared float weights[args.step * args.lanes];
  shared float rows[args.tile * args.step];
  float sums[args.tile];
  for (int t = 0; t < args.tile; ++t) sums[t] = 0.0f;
  for (int start = 0; start < args.columns; start += args.step) {
    for (int i = lane(); i < args.step * args.lanes; i += args.lanes) {
      const int k = K_OF;
      const int m = group(0) * args.lanes + M_OF;
      const int from = start + k;
      float weight = 0.0f;
      if (from < args.columns && m < args.rows) weight = WEIGHT;
      weights[k * args.lanes + M_OF] = weight;
    }
    for (int i = lane(); i < args.tile * args.step; i += args.lanes) {
      const int token = first + i / args.step;
      const int from = start + i % args.step;
      float x = 0.0f;
      if (token < args.tokens && from < args.columns) x = args.x.Read(token, from);
      rows[i] = x;
    }
    synchronise();
    const int count = min(args.step, args.columns - start);
    for (int k = 0; k < count; ++k) {
      const float weight = weights[k * args.lanes + lane()];
      for (int t = 0; t < args.tile; ++t) sums[t] += rows[t * args.step + k] * weight;
    }
    synchronise();
  }
  if (column < args.rows) {
    for (int t = 0; t < args.tile; ++t) {
      const int token = first + t;
      if (token < args.tokens) {
        args.y.Write(sums[t], token, column);
      }
    }
  }
)";

void replace(std::string& text, const std::string& word, const std::string& by) {
  for (std::size_t at = text.find(word); at != std::string::npos;
       at = text.find(word, at + by.size()))
    text.replace(at, word.size(), by);
}

// In either order of the weight, neighbouring lanes read neighbouring elements.
std::string body_of(const DenseShape& shape) {
  std::string body = kBody;
  replace(body, "K_OF", shape.transposed ? "i % args.step" : "i / args.lanes");
  replace(body, "M_OF", shape.transposed ? "i / args.step" : "i % args.lanes");
  replace(body, "WEIGHT",
          shape.transposed ? "(float)args.w.Read(m, from)" : "(float)args.w.Read(from, m)");
  return body;
}

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
  std::vector<Size> of_weight{shape.columns, shape.rows};
  if (shape.transposed) std::swap(of_weight[0], of_weight[1]);
  KernelDescription kernel{
      .name = "dense_matmul",
      .body = body_of(shape),
      .tensors = {{.name = "x", .sizes = {tokens, shape.columns}},
                  {.name = "w", .element = shape.weight, .sizes = of_weight},
                  {.name = "y", .access = Access::kWrite, .sizes = {tokens, shape.rows}}},
      .constants = {{"rows", shape.rows},
                    {"columns", shape.columns},
                    {"tile", kTileRows},
                    {"step", kStep}},
      .parameters = {tokens},
      .lanes = kLanes};
  std::vector<Link>& links = kernel.links["y"];
  if (shape.has_scale)
    links.push_back({.code = "value *= args.scale.Read(at1);",
                     .tensors = {{.name = "scale", .sizes = {shape.rows}}}});
  if (shape.has_bias)
    links.push_back({.code = "value += args.bias.Read(at1);",
                     .tensors = {{.name = "bias", .sizes = {shape.rows}}}});
  if (const std::string code = activation_of(shape.activation); !code.empty())
    links.push_back({.code = code});
  if (shape.has_residual) {
    links.push_back({.code = "value += args.residual.Read(at0 % args.residual_rows, at1);",
                     .tensors = {{.name = "residual", .sizes = {tokens, shape.rows}}}});
    kernel.parameters.push_back("residual_rows");
  }
  return kernel;
}

Grid dense_matmul_grid(const DenseShape& shape, std::int64_t tokens) {
  return {.groups = {q4nx::ceil_div(shape.rows, kLanes), q4nx::ceil_div(tokens, kTileRows), 1},
          .lanes = kLanes};
}

}  // namespace flownpu::gpu
