// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/match/encoder_layers.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "ops/error.h"
#include "ops/npu/nodes/lowered_node.h"
#include "ops/npu/weights/pack.h"
#include "ops/transformer/graph/operators.h"
#include "ops/transformer/graph/walk.h"

namespace flownpu::npu {
namespace {

// Elements of bf16 that the designs on rows take at a time.
constexpr std::int64_t kLanes = 16;

class EncoderMatcher {
 public:
  explicit EncoderMatcher(const transformer::GraphWalk& graph) : graph_(graph) {}

  // Throws Error that names the node in the way.
  void match(const Node& convolution);

  EncoderShape shape;
  EncoderConstants constants;
  std::unordered_set<const Node*> taken;
  const Node* projector = nullptr;

 private:
  std::string_view embed(const Node& convolution);
  std::string_view layer(std::string_view hidden);
  std::string_view attend(std::string_view packed);
  std::string_view norm(std::string_view hidden);
  void pool(std::string_view normal);

  const Node& product(std::string_view x, const char* what, DenseConstants& found);
  std::string_view project(std::string_view x, const char* what, std::string_view hidden = "");
  std::string_view project_and_activate(std::string_view x, const char* what);
  void check_layer() const;
  std::string_view tokens(std::string_view grid, std::int64_t count);
  void check_dims(const Node& reshape, std::initializer_list<std::int64_t> dims) const;
  void check_epsilon(const Node& node, float& known) const;

  // The only reader of a value; it must be this operator of ONNX.
  const Node& next(std::string_view value, std::string_view op_type, const char* what);

  const transformer::GraphWalk& graph_;
  std::vector<const Node*> products_;
};

void expect(const Node& node, bool fits, const char* what) {
  if (!fits) fail(to_string(node), ": expected ", what);
}

bool are_all(const Node& node, std::string_view attribute, std::int64_t value) {
  return std::ranges::all_of(node.integers(attribute),
                             [&](std::int64_t given) { return given == value; });
}

bool is_transpose_of_tokens(const Node& node) {
  return node.integers("perm") == std::vector<std::int64_t>{0, 2, 1};
}

const Node& EncoderMatcher::next(std::string_view value, std::string_view op_type,
                                 const char* what) {
  const Node& node = graph_.only_computing_reader(value, what);
  if (!transformer::is(node, "", op_type))
    fail(to_string(node), ": expected ", what, " (", op_type, ")");
  taken.insert(&node);
  return node;
}

// Checks the dimensions after the first, as ONNX Runtime inferred them or as the target shape says.
void EncoderMatcher::check_dims(const Node& reshape,
                                std::initializer_list<std::int64_t> dims) const {
  const auto are = [&](const std::int64_t* begin, const std::int64_t* end) {
    return end - begin == static_cast<std::ptrdiff_t>(dims.size()) + 1 &&
           std::equal(dims.begin(), dims.end(), begin + 1);
  };
  const Value& made = reshape.outputs[0];
  const Value* target = reshape.input(1);
  const bool inferred = made.shape && are(made.shape->begin(), made.shape->end());
  const auto* sizes =
      target == nullptr ? nullptr : static_cast<const std::int64_t*>(target->constant);
  const bool said = sizes != nullptr && target->type == DataType::kInt64 && target->shape &&
                    are(sizes, sizes + target->shape->elements());
  if (inferred || said) return;
  std::string wanted;
  for (const std::int64_t dim : dims) wanted.append(",").append(std::to_string(dim));
  fail(to_string(reshape), ": expected it to make [N", wanted, "]");
}

void EncoderMatcher::check_epsilon(const Node& node, float& known) const {
  const float epsilon = node.number("epsilon", 1e-5F);
  if (known == 0) known = epsilon;
  if (epsilon != known)
    fail(to_string(node), ": expected the epsilon of all layer norms to be ", known, ", got ",
         epsilon);
}

const Node& EncoderMatcher::product(std::string_view x, const char* what, DenseConstants& found) {
  const Node& node = graph_.only_computing_reader(x, what);
  const bool dense = transformer::is_dense_product(node);
  if (!dense && !transformer::is_projection(node))
    fail(to_string(node), ": expected ", what, " (DenseMatMul or Q4NXMatMul)");
  expect(node, node.inputs[0].name == x, "activations as its first factor");
  found.weight = read_dense_weight(node);
  const std::size_t bias = dense ? std::size_t{transformer::kDenseBias} : std::size_t{kProductBias};
  if (node.input(bias) != nullptr)
    found.bias = float_constant(node, bias, Shape{found.weight.columns});
  taken.insert(&node);
  products_.push_back(&node);
  return node;
}

const Value* residual_of(const Node& product) {
  const bool dense = transformer::is_dense_product(product);
  return product.input(dense ? std::size_t{transformer::kDenseResidual}
                             : std::size_t{kProductResidual});
}

// If the residual stream `hidden` is given, the product must add it, and no node but the norm
// before may also read it.
std::string_view EncoderMatcher::project(std::string_view x, const char* what,
                                         std::string_view hidden) {
  const Node& node = product(x, what, constants.projections.emplace_back());
  const Value* residual = residual_of(node);
  const bool fits = hidden.empty() ? residual == nullptr
                                   : residual != nullptr && residual->name == hidden &&
                                         graph_.readers(hidden).size() == 2;
  expect(node, fits && node.text("activation", "none") == "none",
         hidden.empty() ? "neither a residual nor an activation"
                        : "the residual stream to be added, and no activation");
  return node.outputs[0].name;
}

std::string_view EncoderMatcher::project_and_activate(std::string_view x, const char* what) {
  const Node& node = product(x, what, constants.projections.emplace_back());
  expect(node, residual_of(node) == nullptr, "no residual");
  if (transformer::is_dense_product(node)) {
    expect(node, node.text("activation", "none") == "gelu_tanh", "activation = gelu_tanh");
    return node.outputs[0].name;
  }
  const Node& gelu = next(node.outputs[0].name, "Gelu", "GELU");
  expect(gelu, gelu.text("approximate", "none") == "tanh", "approximate = tanh");
  return gelu.outputs[0].name;
}

// Checks the weights of the last four products.
void EncoderMatcher::check_layer() const {
  const std::array<DenseProjection, 4> expected = shape.projections();
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const std::size_t place = constants.projections.size() - expected.size() + i;
    const DenseWeight& weight = constants.projections[place].weight;
    if (weight.inner == expected[i].inner && weight.columns == expected[i].columns) continue;
    fail(to_string(*products_[place]), ": expected a weight [", expected[i].inner, ",",
         expected[i].columns, "], got [", weight.inner, ",", weight.columns, "]");
  }
}

// From a grid of patches [N, D, h, w] to tokens [N, h w, D].
std::string_view EncoderMatcher::tokens(std::string_view grid, std::int64_t count) {
  const Node& flat = next(grid, "Reshape", "a row of tokens");
  check_dims(flat, {shape.hidden, count});
  const Node& turned = next(flat.outputs[0].name, "Transpose", "tokens");
  expect(turned, is_transpose_of_tokens(turned), "perm = 0, 2, 1");
  return turned.outputs[0].name;
}

std::string_view EncoderMatcher::embed(const Node& convolution) {
  constants.embedding.weight = read_patch_weight(convolution);
  const Shape weight = shape_of(convolution.input(1));
  shape.hidden = weight[0];
  shape.channels = weight[1];
  shape.patch = weight[2];
  constants.embedding.bias = float_constant(convolution, 2, Shape{shape.hidden});
  const std::vector<std::int64_t> square{shape.patch, shape.patch};
  expect(convolution,
         weight[3] == shape.patch && convolution.integers("strides") == square &&
             are_all(convolution, "pads", 0) && are_all(convolution, "dilations", 1) &&
             convolution.integer("group", 1) == 1 &&
             convolution.text("auto_pad", "NOTSET") == "NOTSET",
         "square patches: strides as large as the kernel, no pads, dilations or groups");
  taken.insert(&convolution);

  const Node& flat = graph_.only_computing_reader(convolution.outputs[0].name, "a row of tokens");
  const Node& turned = graph_.only_computing_reader(flat.outputs[0].name, "tokens");
  const Node& sum = graph_.only_computing_reader(turned.outputs[0].name, "positions");
  expect(sum, transformer::is(sum, "", "Add"), "the sum of embeddings and their positions");
  const std::size_t table = sum.inputs[0].name == turned.outputs[0].name ? 1 : 0;
  const Shape positions = shape_of(sum.input(table));
  expect(sum, positions.rank() >= 2, "positions to be an initializer [patches, D]");
  const std::int64_t patches = positions[-2];
  shape.grid = std::lround(std::sqrt(static_cast<double>(patches)));
  expect(sum, shape.patches() == patches, "a square of patches");
  tokens(convolution.outputs[0].name, patches);
  const Shape expected =
      positions.rank() == 2 ? Shape{patches, shape.hidden} : Shape{1, patches, shape.hidden};
  constants.positions = float_constant(sum, table, expected);
  taken.insert(&sum);
  return sum.outputs[0].name;
}

// Finds the norm of the residual stream, which the residual connection reads, too.
std::string_view EncoderMatcher::norm(std::string_view hidden) {
  const auto& readers = graph_.readers(hidden);
  const auto found = std::ranges::find_if(
      readers, [](const Node* node) { return transformer::is(*node, "", "LayerNormalization"); });
  if (found == readers.end())
    fail("the encoder: expected '", hidden, "' to be read by a LayerNormalization");
  const Node& node = **found;
  const std::int64_t axis = node.integer("axis", -1);
  expect(node, axis == -1 || axis == 2, "axis = -1");
  expect(node, !node.has_output(1) && !node.has_output(2), "one output");
  check_epsilon(node, shape.epsilon);
  constants.norms.push_back(
      {float_constant(node, 1, Shape{shape.hidden}), float_constant(node, 2, Shape{shape.hidden})});
  taken.insert(&node);
  return node.outputs[0].name;
}

std::string_view EncoderMatcher::attend(std::string_view packed) {
  const Node& node = graph_.only_computing_reader(packed, "attention");
  expect(node, transformer::is_attention(node), "attention (FlowQKVAttention)");
  const std::int64_t heads = node.required_integer("num_heads");
  const std::int64_t head_size = node.required_integer("head_size");
  float scale = node.number("scale", 0);
  if (scale == 0) scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_size)));
  if (shape.layers == 0) {
    shape.heads = heads;
    shape.head_size = head_size;
    shape.scale = scale;
  }
  expect(node,
         heads == shape.heads && node.integer("kv_num_heads", heads) == heads &&
             head_size == shape.head_size && scale == shape.scale,
         "heads without grouping, and the same heads and scale in all layers");
  expect(node, node.integer("causal", 1) == 0, "causal = 0");
  expect(node, node.integer("local_window_size", -1) == -1, "no window");
  expect(node, node.integer("do_rotary", 0) == 0, "do_rotary = 0");
  expect(node, node.number("softcap", 0) == 0, "no softcap: the array has none");
  for (std::size_t input = kKey; input < node.inputs.size(); ++input)
    expect(node, node.input(input) == nullptr, "packed QKV as its only input");
  for (const std::size_t present : {kPresentKey, kPresentValue}) {
    expect(node, !node.has_output(present) || graph_.readers(node.outputs[present].name).empty(),
           "that nothing reads its keys and values");
  }
  taken.insert(&node);
  return node.outputs[0].name;
}

std::string_view EncoderMatcher::layer(std::string_view hidden) {
  const std::string_view attended = attend(project(norm(hidden), "the QKV product"));
  const std::string_view middle = project(attended, "the output product", hidden);
  const std::string_view activated = project_and_activate(norm(middle), "the up product");
  if (shape.layers == 0) shape.feed_forward = constants.projections.back().weight.columns;
  const std::string_view end = project(activated, "the down product", middle);
  check_layer();
  ++shape.layers;
  return end;
}

void EncoderMatcher::pool(std::string_view normal) {
  const Node& turned = next(normal, "Transpose", "channels before the pooling");
  expect(turned, is_transpose_of_tokens(turned), "perm = 0, 2, 1");
  const Node& square = next(turned.outputs[0].name, "Reshape", "a grid before the pooling");
  check_dims(square, {shape.hidden, shape.grid, shape.grid});
  const Node& pooling = next(square.outputs[0].name, "AveragePool", "average pooling");
  const std::vector<std::int64_t> kernel = pooling.integers("kernel_shape");
  shape.pooling = kernel.empty() ? 0 : kernel[0];
  expect(pooling,
         shape.pooling > 0 && shape.grid % shape.pooling == 0 &&
             kernel == std::vector<std::int64_t>(2, shape.pooling) &&
             pooling.integers("strides") == kernel && are_all(pooling, "pads", 0) &&
             are_all(pooling, "dilations", 1) && pooling.text("auto_pad", "NOTSET") == "NOTSET",
         "squares that tile the grid: strides as large as the kernel, no pads");
  const std::string_view pooled = tokens(pooling.outputs[0].name, shape.tokens());
  const Node& norm = next(pooled, "SimplifiedLayerNormalization", "the norm of pooled tokens");
  constants.pooled_norm = float_constant(norm, 1, Shape{shape.hidden});
  check_epsilon(norm, shape.pooled_epsilon);
  projector = &product(norm.outputs[0].name, "the projector", constants.projector);
  shape.features = constants.projector.weight.columns;
  expect(*projector,
         constants.projector.weight.inner == shape.hidden && constants.projector.bias == nullptr &&
             residual_of(*projector) == nullptr && projector->text("activation", "none") == "none",
         "a weight [D, features], and nothing after it");
}

void EncoderMatcher::match(const Node& convolution) {
  std::string_view hidden = embed(convolution);
  do {
    hidden = layer(hidden);
  } while (graph_.readers(hidden).size() == 2);
  pool(norm(hidden));
  // Sizes that the array's buffers support.
  const auto& [qkv, output, up, down] = shape.projections();
  if (up.padded_columns() > down.bias_row()) {
    fail(to_string(convolution), ": expected a feed-forward that fills ", up.padded_columns(),
         " columns, which are computed at least: the column behind it is the next bias's; got ",
         shape.feed_forward);
  }
  if (shape.hidden % kLanes != 0) {
    fail(to_string(convolution), ": expected a hidden size in multiples of ", kLanes, ", got ",
         shape.hidden);
  }
}

bool is_standard_convolution(const Node& node) { return transformer::is(node, "", "Conv"); }

}  // namespace

bool is_for_encoder(const Node& node) {
  return is_standard_convolution(node) || transformer::is_dense_product(node) ||
         transformer::is_projection(node) || transformer::is_attention(node);
}

bool is_encoder(const std::vector<Node>& nodes) {
  return std::ranges::any_of(nodes, is_standard_convolution) &&
         std::ranges::any_of(nodes, [](const Node& node) {
           return transformer::is_attention(node) && node.integer("causal", 1) == 0;
         });
}

std::vector<Node> with_encoder_layers(const std::vector<Node>& nodes,
                                      const std::vector<std::string>& outputs) {
  const transformer::GraphWalk graph(nodes, outputs);
  EncoderMatcher found(graph);
  const auto convolution = std::ranges::find_if(nodes, is_standard_convolution);
  if (convolution == nodes.end())
    fail("the array computes encoders of images, and there is no convolution");
  found.match(*convolution);
  Node node;
  node.name = convolution->name + " .. " + found.projector->name;
  node.op_type = kEncoderLayers;
  node.domain = kNpuDomain;
  found.shape.write(node);
  node.inputs = {convolution->inputs[0]};
  node.outputs = {found.projector->outputs[0]};
  node.packed = pack(found.shape, found.constants);
  return transformer::with_one_node(nodes, graph, found.taken, found.projector, node, outputs);
}

}  // namespace flownpu::npu
