// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/encoder_calls.h"

#include <cstdint>
#include <utility>

#include "ops/npu/lowered_node.h"

namespace flownpu::npu {
namespace {

class Writer {
 public:
  explicit Writer(const EncoderShape& shape)
      : shape_(shape), rows_(padded_tokens(shape.patches())), projections_(shape.projections()) {}

  std::vector<EncoderCall> write() {
    where_ = "embedding";
    multiply(shape_.embedding(), "patches", "embedded");
    add_layer_norm(shape_.embedding(), "embedded",
                   elements("vectors", 0, shape_.patches() * shape_.hidden), "hidden", "x");
    for (std::int64_t layer = 0; layer < shape_.layers; ++layer) {
      where_ = "layer " + std::to_string(layer);
      multiply(projections_[0], "x", "qkv");
      flow_qkv();
      multiply(projections_[1], "context", "attended");
      add_layer_norm(projections_[1], "attended", stream("hidden"), "residual", "x");
      multiply(projections_[2], "x", "activated");
      multiply(projections_[3], "activated", "update");
      const bool last = layer + 1 == shape_.layers;
      add_layer_norm(projections_[3], "update", stream("residual"), "hidden",
                     last ? "normal" : "x");
    }
    where_ = "projector";
    pool();
    project();
    return std::move(calls_);
  }

 private:
  void add(std::string_view op_type, CallAttributes attributes, std::vector<NamedView> arguments) {
    calls_.push_back({.op_type = op_type,
                      .attributes = std::move(attributes),
                      .name = std::string(op_type) + ", " + where_,
                      .arguments = std::move(arguments)});
  }

  // target = act(W source + bias); weights follow one another in the order of their products.
  void multiply(const DenseProjection& part, std::string_view source, std::string_view target) {
    const std::int64_t line = part.has_gelu ? projections_[3].padded_rows() : part.padded_columns();
    product(part, rows_, elements(source, 0, rows_ * part.padded_rows()), target, line);
  }

  // A line of `pooled` is D elements: where K is longer, weights are zeros.
  void project() {
    const DenseProjection part = shape_.projector();
    const std::int64_t rows = padded_tokens(shape_.tokens());
    const std::int64_t size = (rows - 1) * part.inner + part.padded_rows();
    product(part, rows, elements("pooled", 0, size), "features", part.padded_columns());
  }

  void product(const DenseProjection& part, std::int64_t rows, const NamedView& source,
               std::string_view target, std::int64_t line) {
    add("gemm",
        {{"rows", {rows}},
         {"k", {part.rows()}},
         {"n", {part.padded_columns()}},
         {"epilogue", {part.has_gelu ? 3 : 0}},
         {"c_line", {line}}},
        {source,
         {.buffer = "weights", .offset = weights_, .bytes = part.bytes()},
         elements(target, 0, rows * line)});
    weights_ += part.bytes();
  }

  void flow_qkv() {
    const std::int64_t line = projections_[0].padded_columns();
    const std::int64_t o_line = projections_[1].padded_rows();
    const NamedView qkv = elements("qkv", 0, rows_ * line);
    add("flow_qkv",
        {{"tokens", {shape_.patches()}},
         {"heads", {shape_.heads}},
         {"kv_heads", {shape_.heads}},
         {"head_size", {shape_.head_size}},
         {"rows", {rows_}},
         {"line", {line}},
         {"o_line", {o_line}},
         {"causal", {0}},
         {"scale", {bits_of(shape_.scale)}}},
        {qkv, qkv, elements("context", 0, rows_ * o_line)});
  }

  // sum = update + before; target = norm(sum), by the next of the norms.
  void add_layer_norm(const DenseProjection& made_by, std::string_view update,
                      const NamedView& before, std::string_view sum, std::string_view target) {
    const std::int64_t patches = shape_.patches();
    const std::int64_t line = made_by.padded_columns();
    const std::int64_t y_line = target == "x" ? projections_[0].padded_rows() : shape_.hidden;
    const std::int64_t first = (patches + 2 * norms_++) * shape_.hidden;
    add("add_layer_norm",
        {{"rows", {patches}},
         {"n", {shape_.hidden}},
         {"epsilon", {bits_of(shape_.epsilon)}},
         {"x_line", {line}},
         {"y_line", {y_line}}},
        {elements(update, 0, patches * line), before, elements("vectors", first, 2 * shape_.hidden),
         stream(sum), elements(target, 0, patches * y_line)});
  }

  void pool() {
    const std::int64_t weight = shape_.vector_elements() - shape_.hidden;
    add("patch_pooling",
        {{"grid", {shape_.grid}},
         {"n", {shape_.hidden}},
         {"side", {shape_.pooling}},
         {"epsilon", {bits_of(shape_.pooled_epsilon)}}},
        {stream("normal"), elements("vectors", weight, shape_.hidden),
         elements("pooled", 0, shape_.tokens() * shape_.hidden)});
  }

  static NamedView elements(std::string_view buffer, std::int64_t first, std::int64_t count) {
    return {.buffer = buffer,
            .offset = static_cast<std::size_t>(first) * kBFloat16Bytes,
            .bytes = static_cast<std::size_t>(count) * kBFloat16Bytes};
  }
  NamedView stream(std::string_view buffer) const {
    return elements(buffer, 0, shape_.patches() * shape_.hidden);
  }

  const EncoderShape& shape_;
  std::int64_t rows_;
  std::array<DenseProjection, 4> projections_;
  std::string where_;
  std::size_t weights_ = 0;  // of the products so far
  std::int64_t norms_ = 0;   // so far
  std::vector<EncoderCall> calls_;
};

}  // namespace

std::vector<EncoderCall> encoder_calls(const EncoderShape& shape) { return Writer(shape).write(); }

std::map<std::string_view, DenseProjection> encoder_lines(const EncoderShape& shape) {
  const auto [qkv, output, up, down] = shape.projections();
  return {{"patches", shape.embedding()}, {"x", qkv}, {"context", output}, {"activated", down}};
}

}  // namespace flownpu::npu
