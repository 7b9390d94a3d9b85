// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/kernels/product.h"

#include <utility>

#include "ops/error.h"
#include "ops/gpu/kernels/pieces.h"
#include "ops/gpu/language/text.h"

namespace flownpu::gpu {
namespace {

// A tile of experts' choices: no group of columns is read for one without any.
constexpr const char* kFirst = R"(
  const int expert = args.tiles.Read(group(1), 0);
  const int first = args.tiles.Read(group(1), 1);
  const int end = args.tiles.Read(group(1), 2);
  const int blocks = expert * args.parts * args.row_blocks;
  const int groups = end > first ? args.groups : 0;
  shared int places[TILE];
  for (int i = lane(); i < TILE; i += args.lanes)
    places[i] = args.order.Read(max(min(first + i, end - 1), 0));
  synchronise();
)";

// `text` in which WORD(..) is `before` .. `after`.
std::string expanded(std::string text, const std::string& word, const std::string& before,
                     const std::string& after) {
  for (std::size_t at = text.find(word + "("); at != std::string::npos;
       at = text.find(word + "(", at)) {
    const std::size_t begin = at + word.size() + 1;
    const std::size_t end = text.find(')', begin);
    const std::string by = text_of(before, text.substr(begin, end - begin), after);
    text.replace(at, end + 1 - at, by);
  }
  return text;
}

}  // namespace

std::string in_tiles(const ProductShape& shape, std::int64_t tile, std::string text) {
  const bool is_of_experts = shape.experts.has_value();
  const std::string size = std::to_string(tile);
  text = replaced(std::move(text),
                  {{"FIRST", is_of_experts ? replaced(kFirst, "TILE", size)
                                           : text_of("const int first = group(1) * ", size, ";")},
                   {"GROUPS", is_of_experts ? "groups" : "args.groups"},
                   {"BLOCKS", is_of_experts ? "blocks + " : ""}});
  if (is_of_experts) {
    text = expanded(std::move(text), "TOKEN_OF", "places[", "] / args.share");
    text = expanded(std::move(text), "WITHIN", "first + ", " < end");
    return expanded(std::move(text), "PLACE_OF", "places[", "]");
  }
  text = expanded(std::move(text), "TOKEN_OF", "min(first + ", ", args.tokens - 1)");
  text = expanded(std::move(text), "WITHIN", "first + ", " < args.tokens");
  return expanded(std::move(text), "PLACE_OF", "first + ", "");
}

void add_experts(const ProductShape& shape, std::vector<TensorDescription> choices,
                 KernelDescription& kernel) {
  if (!shape.experts) return;
  kernel.constants["share"] = shape.experts->share;
  for (TensorDescription& tensor : choices) kernel.tensors.push_back(std::move(tensor));
  if (shape.experts->has_bias)
    kernel.tensors.push_back(
        {.name = "of_experts", .sizes = {shape.experts->count, 2 * shape.rows}});
  if (!shape.experts->is_special()) return;
  kernel.constants.insert({{"alpha", shape.experts->alpha}, {"beta", shape.experts->beta}});
  if (shape.experts->limit > 0) kernel.constants["limit"] = shape.experts->limit;
}

std::int64_t parts_of(const ProductShape& shape) { return shape.gating == Gating::kNone ? 1 : 2; }

TensorDescription weight_of(const ProductShape& shape) {
  return {.name = "w",
          .element = Element::kQ4NX,
          .sizes = {(shape.experts ? shape.experts->count : 1) * parts_of(shape) *
                        q4nx::row_blocks(shape.rows) * q4nx::kBlockRows,
                    shape.columns},
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

std::string gated(const ProductShape& shape, const std::string& of_gate, const std::string& of_up) {
  const bool has_bias = shape.experts && shape.experts->has_bias;
  std::string gate = has_bias ? "(" + of_gate + " + args.of_experts.Read(expert, m))" : of_gate;
  const std::string up =
      has_bias ? "(" + of_up + " + args.of_experts.Read(expert, args.rows + m))" : of_up;
  if (shape.experts && shape.experts->is_special())
    return text_of("limited_swiglu(", gate, ", ", up, ", args.alpha, args.beta, ",
                   shape.experts->limit > 0 ? "args.limit" : "INFINITY", ")");
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
