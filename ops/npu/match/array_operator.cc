// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/match/array_operator.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <utility>

#include "ops/error.h"
#include "ops/nodes/q4nx_moe.h"
#include "ops/npu/match/convolution.h"
#include "ops/npu/nodes/encoder_shape.h"
#include "ops/npu/nodes/lowered_node.h"
#include "ops/npu/nodes/sinks.h"
#include "ops/npu/weights/pack.h"
#include "ops/transformer/decoder_constants.h"
#include "ops/transformer/graph/operators.h"

namespace flownpu::npu {
namespace {

// Operators and the stems of their programs.
constexpr std::array<std::pair<std::string_view, std::string_view>, 8> kStems{{
    {"Q4NXMatMul", "q4nx_matmul"},
    {"Q4NXMoE", "q4nx_matmul"},
    {"FusedDQP", "fused_dqp"},
    {"DenseMatMul", "dense_matmul"},
    {"FlowQKVAttention", "flow_qkv_attention"},
    {"FlowKVAttention", "flow_kv_attention"},
    {"Conv", "convolution"},
    {"FusedConv", "convolution"},
}};

constexpr ExpertPart kExpertParts[] = {ExpertPart::kGateUp, ExpertPart::kDown};
constexpr std::size_t kFirstOfMixture = 2;  // input of a mixture that is a weight

bool is_mixture(const Node& node) { return transformer::is(node, kDomain, "Q4NXMoE"); }

// The name under which a mixture on the array has packed an expert's constant.
std::string packed_name(ExpertPart part, std::int64_t expert) {
  return (part == ExpertPart::kGateUp ? "gate_up." : "down.") + std::to_string(expert);
}

const std::string_view* stem_of(const Node& node) {
  const auto* found =
      std::ranges::find_if(kStems, [&](const auto& entry) { return entry.first == node.op_type; });
  return found == kStems.end() ? nullptr : &found->second;
}

Node sizes_of(const Node& node) {
  Node sizes;
  sizes.name = node.name;
  sizes.op_type = *stem_of(node);
  sizes.domain = kNpuDomain;
  return sizes;
}

// The product of the axes first .. end - 1; 0 if one is not known.
std::int64_t known_elements(const Value& value, int first, int end) {
  if (!value.shape || value.shape->rank() < end) return 0;
  std::int64_t count = 1;
  for (int axis = first; axis < end; ++axis)
    count *= std::max<std::int64_t>((*value.shape)[axis], 0);
  return count;
}

// Whether the codes of a product's Q4NX weight stand for int8 values.
bool has_eight_bits(const Node& product) {
  const Value* weight = product.input(1);
  const auto layout =
      weight != nullptr && weight->shape ? q4nx::layout_of(*weight->shape) : std::nullopt;
  return layout && layout->is_signed();
}

ArrayOperator describe_product(const Node& node) {
  DenseProjection product{.has_bias = false};
  if (transformer::is_dense_product(node)) {
    const Value* weight = node.input(1);
    if (weight == nullptr || weight->constant == nullptr || shape_of(weight).rank() != 2)
      fail(to_string(node), ": expected W to be an initializer of two axes");
    const bool transposed = node.integer("transposed", 0) != 0;
    product.inner = shape_of(weight)[transposed ? 1 : 0];
    product.columns = shape_of(weight)[transposed ? 0 : 1];
  } else {
    const bool gated = node.text("gating", "none") != "none";
    product.inner = node.required_integer("K");
    product.columns =
        q4nx::row_blocks(node.required_integer("M")) * (gated ? 2 : 1) * q4nx::kBlockRows;
  }
  Node sizes = sizes_of(node);
  sizes.attributes["inner"] = product.inner;
  sizes.attributes["columns"] = product.columns;
  if (!transformer::is_dense_product(node))
    sizes.attributes["eight_bits"] = std::int64_t{has_eight_bits(node)};
  const Shape x = shape_of(node.input(0));
  return {.sizes = {std::move(sizes)},
          .multiply_adds = product.inner * product.columns,
          .rows = x.rank() == 0 ? 0 : known_elements(*node.input(0), 0, x.rank() - 1)};
}

ArrayOperator describe_convolution(const Node& node) {
  const ConvolutionSizes convolution = sizes_of_convolution(node);
  Node sizes = sizes_of(node);
  transformer::write_fields(sizes, "", std::vector{convolution});
  const std::int64_t taps = convolution.kernel_height * convolution.kernel_width;
  return {.sizes = {std::move(sizes)},
          .multiply_adds = taps * convolution.channels * convolution.filters,
          .rows = convolution.batch * convolution.lines() * convolution.pixels()};
}

// A mixture's products. Each expert gets its share of the rows of X.
ArrayOperator describe_mixture(const Node& node) {
  if (const std::string special = special_experts(node); !special.empty())
    fail(to_string(node), ": expected no ", special, ", which the array's experts have not");
  ArrayOperator found;
  for (const ExpertPart part : kExpertParts) {
    ArrayOperator product = describe_product(expert_product(node, part, 0));
    found.sizes.push_back(std::move(product.sizes.front()));
    found.multiply_adds = std::max(found.multiply_adds, product.multiply_adds);
    found.rows = std::max(found.rows, product.rows);
  }
  found.multiply_adds = found.multiply_adds * node.required_integer("experts_per_token") /
                        node.required_integer("num_experts");
  return found;
}

void refuse_input(const Node& node, std::size_t input, const char* what) {
  if (node.input(input) != nullptr)
    fail(to_string(node), ": expected no ", what, ", which the array's attention has not");
}

ArrayOperator describe_attention(const Node& node) {
  if (const Value* sinks = node.input(kHeadSink); sinks != nullptr && sinks->constant == nullptr)
    fail(to_string(node), ": expected head_sink to be an initializer");
  refuse_input(node, kBidirectionalBlocks, "bidirectional_blocks");
  if (const Value* key = node.input(kKey);
      key != nullptr && key->shape && key->shape->rank() == 3 && (*key->shape)[1] == 0) {
    fail(to_string(node), ": expected keys and values of each token, which the array appends");
  }
  if (node.number("softcap", 0.0F) > 0.0F)
    fail(to_string(node), ": expected no softcap, which the array's attention has not");
  const bool causal = node.integer("causal", 1) != 0;
  const bool masked = node.input(kAttentionBias) != nullptr;
  if (masked && causal)
    fail(to_string(node),
         ": expected no attention_bias beside a causal mask, which the array's attention has not");
  const Value* past = node.input(kPastKey);
  if (past != nullptr && past->type == DataType::kInt8)
    fail(to_string(node),
         ": expected a KV cache in bf16, fp16 or fp32, got int8, which the array does not read");
  const std::int64_t heads = node.required_integer("num_heads");
  const std::int64_t head_size = node.required_integer("head_size");
  Node sizes = sizes_of(node);
  sizes.attributes = {
      {"num_heads", heads},
      {"kv_num_heads", node.integer("kv_num_heads", heads)},
      {"head_size", head_size},
      {"local_window_size", std::max<std::int64_t>(node.integer("local_window_size", -1), 0)},
      {"causal", std::int64_t{causal}},
      {"sinks", std::int64_t{node.input(kHeadSink) != nullptr}}};
  ArrayOperator found{.sizes = {sizes}, .multiply_adds = 2 * heads * head_size};
  if (masked) {
    sizes.attributes["causal"] = std::int64_t{1};
    found.sizes.push_back(std::move(sizes));
  }
  const std::int64_t tokens = known_elements(*node.input(kQuery), 1, 2);
  if (node.input(kPastKey) == nullptr)
    found.rows = known_elements(*node.input(kQuery), 0, 1) * tokens * tokens;
  return found;
}

// The weight in wide blocks, padded with zeros to the rows of blocks that GEMM computes at least.
Packed pack_blocks(const Node& product) {
  const transformer::Q4NXWeight weight = transformer::read_q4nx_weight(product);
  const DenseProjection sizes{.inner = weight.columns,
                              .columns = weight.row_blocks() * q4nx::kBlockRows,
                              .has_bias = false};
  const auto rows = static_cast<std::size_t>(sizes.padded_columns() / q4nx::kBlockRows);
  return {"weights", rows * wide_row_bytes(weight),
          [weight, owner = product.inputs[1].owner](std::span<std::byte> memory) {
            PackedWriter writer(memory);
            for (std::int64_t row = 0; row < weight.row_blocks(); ++row)
              write_wide_row(weight, row, writer.take(wide_row_bytes(weight)));
            writer.zeros(memory.size() -
                         static_cast<std::size_t>(weight.row_blocks()) * wide_row_bytes(weight));
          }};
}

Packed pack_panels(const Node& product) {
  const DenseWeight weight = read_dense_weight(product);
  const DenseProjection sizes{.inner = weight.inner, .columns = weight.columns, .has_bias = false};
  return {"weights", sizes.bytes(),
          [weight, rows = sizes.padded_rows()](std::span<std::byte> memory) {
            write_panels(weight, rows, memory);
          }};
}

Packed pack_sinks(const Node& attention) {
  const std::int64_t heads = attention.required_integer("num_heads");
  const std::int64_t kv_heads = attention.integer("kv_num_heads", heads);
  const std::int64_t head_size = attention.required_integer("head_size");
  const float* sinks = transformer::read_vector(attention, kHeadSink, heads);
  return {"sinks", static_cast<std::size_t>(sink_elements(kv_heads, head_size)) * kBFloat16Bytes,
          [=, owner = attention.inputs[kHeadSink].owner](std::span<std::byte> memory) {
            PackedWriter writer(memory);
            write_sinks({sinks, static_cast<std::size_t>(heads)}, kv_heads, head_size, writer);
          }};
}

}  // namespace

bool is_operator(const Node& node) {
  if (is_convolution(node)) return node.domain != kNpuDomain && takes_convolution(node);
  return node.domain == kDomain && stem_of(node) != nullptr;
}

bool is_operator_on_array(const Node& node) {
  return node.domain == kNpuDomain && stem_of(node) != nullptr;
}

ArrayOperator describe_operator(const Node& node) {
  const Node of_graph = operator_of_graph(node);
  if (is_mixture(of_graph)) return describe_mixture(of_graph);
  if (is_convolution(of_graph)) return describe_convolution(of_graph);
  return transformer::is_attention(of_graph) ? describe_attention(of_graph)
                                             : describe_product(of_graph);
}

Node operator_on_array(Node node) {
  if (is_convolution(node)) {
    node.packed.push_back(pack_filters(node));
  } else if (transformer::is_dense_product(node)) {
    node.packed.push_back(pack_panels(node));
  } else if (transformer::is_projection(node)) {
    node.packed.push_back(pack_blocks(node));
  } else if (transformer::is_attention(node) && node.input(kHeadSink) != nullptr) {
    node.packed.push_back(pack_sinks(node));
  } else if (is_mixture(node)) {
    for (const ExpertPart part : kExpertParts) {
      for (std::int64_t expert = 0; expert < node.required_integer("num_experts"); ++expert) {
        node.packed.push_back(pack_blocks(expert_product(node, part, expert)));
        node.packed.back().name = packed_name(part, expert);
      }
    }
  }
  node.domain = kNpuDomain;
  return node;
}

Node expert_product(const Node& mixture, ExpertPart part, std::int64_t expert) {
  const bool inwards = part == ExpertPart::kGateUp;
  const std::int64_t experts = mixture.required_integer("num_experts");
  const std::int64_t hidden = mixture.required_integer("hidden_size");
  const std::int64_t inner = mixture.required_integer("expert_size");
  Node product;
  product.name = mixture.name + ", expert " + std::to_string(expert);
  product.op_type = "Q4NXMatMul";
  product.domain = mixture.domain;
  product.attributes = {{"M", inwards ? inner : hidden}, {"K", inwards ? hidden : inner}};
  if (inwards) product.attributes["gating"] = mixture.text("gating", "swiglu");
  const Value* weights = mixture.input(kFirstOfMixture + (inwards ? 0 : 1));
  if (weights == nullptr || !weights->shape || weights->shape->rank() != 3 ||
      (*weights->shape)[0] % experts != 0)
    fail(to_string(mixture), ": expected the Q4NX weights of ", experts, " experts");
  Value weight = *weights;
  (*weight.shape)[0] /= experts;
  if (weight.constant != nullptr) {
    weight.constant =
        static_cast<const std::byte*>(weight.constant) + expert * weight.shape->elements();
  }
  product.inputs = {mixture.inputs[0], std::move(weight)};
  const auto packed = std::ranges::find(mixture.packed, packed_name(part, expert), &Packed::name);
  if (packed != mixture.packed.end()) {
    product.packed = {*packed};
    product.packed.front().name = "weights";
  }
  return product;
}

Node operator_of_graph(Node node) {
  if (is_convolution(node)) {
    node = convolution_of_graph(std::move(node));
  } else {
    node.domain = kDomain;
  }
  node.packed.clear();
  node.attributes.erase(kLeastOfOneRow);
  return node;
}

// A dispatch takes some 50 us, and a change of the array's configuration at least 2.7 ms (published
// for XRT's hardware contexts, warm), which most dispatches of operators by themselves need. A core
// of the host computes 450 GOP/s of int8, and 232 GFLOP/s of bf16 (Zen 4 with AVX-512, measured); a
// multiply-add is two operations. The array's own time to compute is not counted.
// With one row both are as fast as they read the weight, 5 bits for a multiply-add. The host reads
// 30 GB/s, the array 66 (aie/cost/parameters.toml): a dispatch of 47 us pays from
// 47 us / (1 / 30 - 1 / 66 GB/s) = 2.6 MB on.
Threshold default_threshold(Activations activations, int threads) {
  constexpr double kSeconds = 50e-6 + 2.7e-3;
  const double of_a_core = activations == Activations::kInt8 ? 450e9 / 2 : 232e9 / 2;
  constexpr double kOneRowBytes = 47e-6 / (1 / 30e9 - 1 / 66e9);
  return {.rows = static_cast<std::int64_t>(kSeconds * of_a_core * threads),
          .one_row = static_cast<std::int64_t>(kOneRowBytes * 8 / 5)};
}

}  // namespace flownpu::npu
