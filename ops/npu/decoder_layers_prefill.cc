// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/decoder_layers_prefill.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "ops/number_formats.h"
#include "ops/q4nx.h"

namespace flownpu::npu {
namespace {

// A rest of fewer tokens than this goes token by token. A chunk reads each weight's 5 bits, writes
// 16 and reads them again, whatever its tokens: 37 bits, where a token of the decode calls reads 5.
constexpr std::int64_t kFewTokens = 37 / 5;

}  // namespace

// Finds the calls of a chunk, and notes them in order. Buffers are called as in
// tests/aie/prefill_layer.py.
class PrefillCalls::Writer {
 public:
  Writer(PrefillCalls& owner, const DecoderBuffers& buffers, Chunk& chunk)
      : owner_(owner),
        shape_(owner.shape_),
        buffers_(buffers),
        chunk_(chunk),
        tokens_(chunk.tokens),
        projections_(shape_.projections()) {}

  void write() {
    for (layer_ = 0; layer_ < shape_.layer_count(); ++layer_) {
      begin();
      project(0, "x", "qkv");
      norm_rope();
      if (layer_ + 1 == shape_.layer_count()) return;
      flow_qkv();
      project(1, "context", "attended");
      add(1, "attended", "hidden", "residual");
      project(2, "x", "activated");
      project(3, "activated", "update");
    }
  }

 private:
  // Adds the update of the layer before to the residual stream, and normalises the sum.
  void begin() {
    if (layer_ == 0) {
      norm("hidden", shape_.entry_norms() - 1);
    } else {
      add(0, "update", "residual", "hidden");
    }
  }

  // after = before + update, normalised first where there are post-norms; x = norm(after).
  void add(std::int64_t entry, const char* update, const char* before, const char* after) {
    const std::int64_t first = entry * shape_.entry_norms();
    std::vector<View> arguments{rows(update), rows(before), norm_weight(first), rows(after)};
    if (shape_.post_norms) {
      step("rms_norm_add", of_rows(), arguments);
      norm(after, first + 1);
    } else {
      arguments.push_back(rows("x"));
      step("add_rms_norm", of_rows(), arguments);
    }
  }

  void norm(const char* source, std::int64_t number) {
    step("rms_norm", of_rows(), {rows(source), norm_weight(number), rows("x")});
  }

  // Dequantises a weight and multiplies by it. GEMM reads K padded to a wide block's columns of
  // each row, whatever lies there, since the weights are zeros there; so the last row is followed
  // by as much.
  void project(std::size_t number, const char* source, const char* target) {
    const Projection& part = projections_[number];
    std::size_t first = static_cast<std::size_t>(layer_) * shape_.layer_weight_bytes();
    for (std::size_t before = 0; before < number; ++before) first += projections_[before].bytes();
    const View blocks{buffers_.weights.get(), first, part.bytes()};
    const CallRecord& engine = owner_.engine(part);
    const View panels = scratch("panels", engine.buffers.back().bytes);
    step(engine, {blocks, panels});

    const std::int64_t padded = q4nx::kWide.stored_groups(part.columns) * q4nx::kGroup;
    const std::int64_t epilogue = !part.gated ? 0 : shape_.activation == "geglu" ? 1 : 2;
    step("gemm",
         {{"rows", {tokens_}}, {"k", {part.columns}}, {"n", {part.rows}}, {"epilogue", {epilogue}}},
         {elements(source, tokens_ * part.columns + padded - part.columns), panels,
          elements(target, tokens_ * part.rows)});
  }

  // Queries, turned, into a buffer of their own; keys, turned, and values into the cache.
  void norm_rope() {
    CallAttributes attributes = of_heads();
    attributes["qk_norm"] = {shape_.qk_norm ? 1 : 0};
    attributes["epsilon"] = {bits_of(shape_.epsilon)};
    attributes["n_tables"] = {shape_.tables()};
    attributes["table"] = {kind().table};
    std::vector<View> arguments{elements("qkv", tokens_ * projections_[0].rows),
                                all(*buffers_.rotary)};
    if (shape_.qk_norm) {
      // At the end of the layer's vectors.
      const std::size_t bytes = 2 * shape_.angle_bytes();
      const std::size_t end = static_cast<std::size_t>(layer_ + 1) * shape_.layer_vector_bytes();
      arguments.push_back({buffers_.vectors.get(), end - bytes, bytes});
    }
    arguments.push_back(heads("q"));
    arguments.push_back(cache());
    step("norm_rope", attributes, arguments);
  }

  void flow_qkv() {
    CallAttributes attributes = of_heads();
    attributes["window"] = {kind().window};
    attributes["scale"] = {bits_of(shape_.scale)};
    step("flow_qkv", attributes, {heads("q"), cache(), heads("context")});
  }

  const LayerKind& kind() const { return shape_.layers[static_cast<std::size_t>(layer_)]; }
  CallAttributes of_rows() const {
    return {{"rows", {tokens_}}, {"n", {shape_.hidden}}, {"epsilon", {bits_of(shape_.epsilon)}}};
  }
  CallAttributes of_heads() const {
    return {{"tokens", {tokens_}},
            {"heads", {shape_.heads}},
            {"kv_heads", {shape_.kv_heads}},
            {"head_size", {shape_.head_size}},
            {"context", {owner_.context_}}};
  }

  void step(const char* op_type, const CallAttributes& attributes, std::vector<View> arguments) {
    step(owner_.designs_->artifacts().require(op_type, attributes), std::move(arguments));
  }
  void step(const CallRecord& record, std::vector<View> arguments) {
    chunk_.calls.add(record, record.op_type + ", layer " + std::to_string(layer_),
                     std::move(arguments));
  }

  // --- Views -------------------------------------------------------------------------------------

  static View all(Buffer& buffer) { return {&buffer, 0, buffer.bytes().size()}; }
  View scratch(const char* name, std::size_t bytes) const {
    return {owner_.buffers_.at(name).get(), 0, bytes};
  }
  View elements(const char* name, std::int64_t count) const {
    return scratch(name, static_cast<std::size_t>(count) * kBFloat16Bytes);
  }
  View rows(const char* name) const { return elements(name, tokens_ * shape_.hidden); }
  View heads(const char* name) const {
    return elements(name, tokens_ * shape_.heads * shape_.head_size);
  }
  View norm_weight(std::int64_t number) const {
    const std::size_t offset = static_cast<std::size_t>(number * shape_.line()) * kBFloat16Bytes;
    return {buffers_.vectors.get(),
            static_cast<std::size_t>(layer_) * shape_.layer_vector_bytes() + offset,
            static_cast<std::size_t>(shape_.hidden) * kBFloat16Bytes};
  }
  View cache() const {
    const std::size_t bytes = static_cast<std::size_t>(owner_.context_) * shape_.position_bytes();
    return {nullptr, static_cast<std::size_t>(layer_) * bytes, bytes};
  }

  PrefillCalls& owner_;
  const DecoderShape& shape_;
  const DecoderBuffers& buffers_;
  Chunk& chunk_;
  std::int64_t tokens_;
  std::array<Projection, 4> projections_;
  std::int64_t layer_ = 0;
};

PrefillCalls::PrefillCalls(std::shared_ptr<CompiledDesigns> designs, const DecoderShape& shape,
                           std::int64_t context)
    : designs_(std::move(designs)), shape_(shape), context_(context) {
  std::set<std::int64_t> sizes;
  for (const CallRecord* call :
       designs_->artifacts().find("norm_rope", {{"heads", {shape.heads}},
                                                {"kv_heads", {shape.kv_heads}},
                                                {"head_size", {shape.head_size}},
                                                {"context", {context}}})) {
    const auto tokens = call->attributes.find("tokens");
    if (tokens != call->attributes.end() && tokens->second.size() == 1)
      sizes.insert(tokens->second.front());
  }
  chunks_.reserve(sizes.size());
  for (const std::int64_t tokens : sizes) chunks_.push_back({tokens, CallList(designs_)});
}

const CallRecord& PrefillCalls::engine(const Projection& part) const {
  return designs_->artifacts().require(
      "dequant_engine",
      {{"m", {part.rows}}, {"k", {part.columns}}, {"gated", {part.gated ? 1 : 0}}});
}

// With room for the largest chunk. What GEMM reads as rows of A ends as much behind the last row as
// K is padded by.
void PrefillCalls::make_buffers() {
  const auto [qkv, output, gate_up, down] = shape_.projections();
  std::map<std::string, std::int64_t> widths{
      {"hidden", shape_.hidden}, {"residual", shape_.hidden}, {"attended", output.rows},
      {"update", down.rows},     {"qkv", qkv.rows},           {"q", output.columns},
      {"x", qkv.columns},        {"context", output.columns}, {"activated", down.columns}};
  const auto make = [&](const std::string& name, std::size_t bytes) {
    std::unique_ptr<Buffer> buffer = designs_->runtime().allocate(bytes);
    buffer->to_device(0, bytes);  // Numbers, which uninitialised memory may not be.
    buffers_[name] = std::move(buffer);
  };
  for (const auto& [name, width] : widths) {
    const std::int64_t elements = chunks_.back().tokens * width + q4nx::kWide.block_columns();
    make(name, static_cast<std::size_t>(elements) * kBFloat16Bytes);
  }
  std::size_t panels = 0;
  for (const Projection& part : shape_.projections())
    panels = std::max(panels, engine(part).buffers.back().bytes);
  make("panels", panels);
}

void PrefillCalls::bind(const DecoderBuffers& buffers) {
  if (chunks_.empty()) return;
  make_buffers();
  for (Chunk& chunk : chunks_) Writer(*this, buffers, chunk).write();
}

std::vector<std::int64_t> PrefillCalls::sizes() const {
  std::vector<std::int64_t> sizes;
  sizes.reserve(chunks_.size());
  for (const Chunk& chunk : chunks_) sizes.push_back(chunk.tokens);
  return sizes;
}

// As few chunks as may be, since dequantising the weights takes the time that multiplying some
// hundred tokens' rows does: the smallest that takes all tokens, or else the largest.
PrefillCalls::Chunk* PrefillCalls::chunk_for(std::int64_t left, std::int64_t position) {
  Chunk* best = nullptr;
  for (Chunk& chunk : chunks_) {
    if (position + chunk.tokens > context_) break;
    best = &chunk;
    if (chunk.tokens >= left) break;
  }
  return best;
}

std::int64_t PrefillCalls::next(std::int64_t left, std::int64_t position) {
  const Chunk* chunk = left <= kFewTokens ? nullptr : chunk_for(left, position);
  return chunk == nullptr ? 0 : std::min(left, chunk->tokens);
}

void PrefillCalls::run(std::span<const float> hidden, std::int64_t position, Buffer& cache) {
  const std::int64_t tokens = static_cast<std::int64_t>(hidden.size()) / shape_.hidden;
  Chunk& chunk = *chunk_for(tokens, position);
  // Rows without a token are zeros, which make finite numbers.
  Buffer& stream = *buffers_.at("hidden");
  const auto bytes = static_cast<std::size_t>(chunk.tokens * shape_.hidden) * kBFloat16Bytes;
  auto* rows = reinterpret_cast<std::uint16_t*>(stream.bytes().data());
  std::ranges::transform(hidden, rows, to_bfloat16);
  std::memset(rows + hidden.size(), 0, bytes - hidden.size() * kBFloat16Bytes);
  stream.to_device(0, bytes);

  const std::string where =
      ", positions " + std::to_string(position) + "-" + std::to_string(position + tokens - 1);
  chunk.calls.run(position, where, &cache);
}

}  // namespace flownpu::npu
