// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/run/decoder_layers.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <ranges>
#include <string>
#include <utility>
#include <vector>

#include "ops/cancellation.h"
#include "ops/error.h"
#include "ops/formats/q4nx.h"
#include "ops/nodes/flow_qkv_attention.h"
#include "ops/npu/nodes/lowered_node.h"
#include "ops/npu/nodes/planes.h"
#include "ops/npu/run/cache_memory.h"
#include "ops/npu/weights/pack.h"
#include "ops/transformer/decoder_call.h"

namespace flownpu::npu {
namespace {

// All rows of the model's rotary tables.
std::vector<std::byte> rotary_of(const Node& node, const DecoderShape& shape) {
  const Packed& rotary = packed(node, "rotary", shape.rotary_bytes());
  std::vector<std::byte> all(rotary.bytes);
  rotary.write(all);
  return all;
}

// Fills the buffer with the rotary tables' rows from `row` on: each table is cut or padded with
// zeros to the length of the programs'.
void write_rotary(std::span<const std::byte> all, const DecoderShape& shape, std::int64_t row,
                  Buffer& buffer) {
  const std::size_t from = static_cast<std::size_t>(shape.positions) * shape.angle_bytes();
  const std::size_t skipped = static_cast<std::size_t>(row) * shape.angle_bytes();
  const auto tables = static_cast<std::size_t>(shape.tables());
  const std::size_t to = buffer.bytes().size() / tables;
  const std::size_t kept = std::min(from - skipped, to);
  for (std::size_t table = 0; table < tables; ++table) {
    std::byte* rows = buffer.bytes().data() + table * to;
    std::memcpy(rows, all.data() + table * from + skipped, kept);
    std::memset(rows + kept, 0, to - kept);
  }
  buffer.to_device(0, buffer.bytes().size());
}

std::unique_ptr<Buffer> upload_rotary(Runtime& runtime, std::span<const std::byte> all,
                                      const DecoderShape& shape, std::size_t bytes) {
  std::unique_ptr<Buffer> buffer = runtime.allocate(bytes);
  if (shape.given_tables)
    buffer->to_device(0, bytes);  // rows are written before a run reads them
  else
    write_rotary(all, shape, 0, *buffer);
  return buffer;
}

// The LM head as an operator of the host.
Node head_of(std::int64_t rows, std::int64_t columns, const Tensor& blocks) {
  Node node;
  node.name = "LM head";
  node.op_type = "Q4NXMatMul";
  node.domain = kDomain;
  node.attributes = {{"M", rows}, {"K", columns}};
  node.inputs = {
      {.name = "rows", .shape = std::nullopt},
      {.name = "blocks", .type = blocks.type, .shape = blocks.shape, .constant = blocks.data}};
  node.outputs = {{.name = "logits", .shape = std::nullopt}};
  return node;
}

// Rows of `columns` elements with each block of 256 elements repeated: a weight's planes
// (nodes/planes.h) take turns in blocks of 256 columns, and both are multiplied by the same
// elements.
std::vector<float> for_planes(std::span<const float> rows, std::int64_t columns) {
  const std::int64_t block = q4nx::kWide.block_columns();
  const std::int64_t wide = wide_columns(columns, true);
  const std::int64_t count = static_cast<std::int64_t>(rows.size()) / columns;
  std::vector<float> twice(static_cast<std::size_t>(count * wide));
  for (std::int64_t row = 0; row < count; ++row) {
    for (std::int64_t i = 0; i < columns; ++i) {
      const std::int64_t place = row * wide + i / block * 2 * block + i % block;
      const float x = rows[static_cast<std::size_t>(row * columns + i)];
      twice[static_cast<std::size_t>(place)] = x;
      twice[static_cast<std::size_t>(place + block)] = x;
    }
  }
  return twice;
}

DecoderShape read_shape(const Node& node) {
  DecoderShape shape{transformer::Decoder::read(node)};
  transformer::check_values_of_decoder(
      node, shape, LayerExperts::inputs(shape) + transformer::count_of_state_inputs(shape));
  return shape;
}

// The experts of the decoder, which become the host's, too; null if there are none.
std::shared_ptr<LayerExperts> experts_of(const Node& node, const DecoderShape& shape,
                                         const ProgramBuffers& buffers, HostCompute& host,
                                         const cpu::Context& context) {
  if (LayerExperts::inputs(shape) == 0) return nullptr;
  Buffer* packed = buffers.find("experts");
  auto experts = std::make_shared<LayerExperts>(
      node, shape, context, packed == nullptr ? std::span<std::byte>() : packed->bytes());
  host.experts = experts;
  return experts;
}

// The mixers with states, which become the host's, too; null if there are none.
std::shared_ptr<LayerStates> states_of(const Node& node, const DecoderShape& shape,
                                       HostCompute& host, const Device& device) {
  if (!shape.has_states()) return nullptr;
  host.states = std::make_shared<LayerStates>(node, shape, device);
  return host.states;
}

// A conversation's cache. A lack of memory for it does not harm the caches of other conversations.
std::unique_ptr<transformer::CacheMemory> make_cache(Runtime& runtime, const DecoderShape& shape,
                                                     const CacheLayout& layout, std::size_t bytes) {
  try {
    return std::make_unique<ArrayCacheMemory>(runtime, shape, layout, bytes);
  } catch (const DeviceError& error) {
    if (error.failure() != Failure::kMemory && error.failure() != Failure::kPermission) throw;
    throw Unsupported(std::string(error.what()) +
                      ". It is for the KV cache of one more conversation: end another, or set the "
                      "provider option on_unsupported to cpu");
  }
}

// "64 or 256"
std::string list_of_tokens(const std::vector<const ProgramRecord*>& programs) {
  std::string list;
  for (const ProgramRecord* program : programs)
    list += (list.empty() ? "" : " or ") + std::to_string(program->tokens);
  return list;
}

}  // namespace

DecoderPrograms DecoderPrograms::find(const Artifacts& artifacts, const Node& node) {
  DecoderPrograms found;
  found.decode = std::ranges::max(artifacts.require("decode", node), {}, &ProgramRecord::context);
  const bool all_logits = transformer::Decoder::read(node).all_logits;
  const auto beside = [&](std::string_view kind) {
    std::vector<const ProgramRecord*> programs = artifacts.programs(kind, node);
    std::erase_if(programs, [&](const ProgramRecord* program) {
      return program->context != found.decode->context || program->cache != found.decode->cache ||
             (all_logits && program->made.view.bytes == 0);
    });
    return programs;
  };
  found.prefill = beside("prefill");
  found.blocks = beside("block");
  return found;
}

std::vector<const ProgramRecord*> DecoderPrograms::all() const {
  std::vector<const ProgramRecord*> programs = prefill;
  programs.insert(programs.end(), blocks.begin(), blocks.end());
  programs.push_back(decode);
  return programs;
}

DecoderLayers::DecoderLayers(const Node& node, std::shared_ptr<CompiledDesigns> designs,
                             HostCompute host, const cpu::Context& context,
                             const Device& host_device)
    : shape_(read_shape(node)),
      designs_(std::move(designs)),
      programs_(DecoderPrograms::find(designs_->artifacts(), node)),
      buffers_(designs_->runtime(), programs_.all(), node,
               {{"rotary",
                 [&](std::size_t bytes) {
                   return upload_rotary(designs_->runtime(), rotary_of(node, shape_), shape_,
                                        bytes);
                 }}}),
      experts_(experts_of(node, shape_, buffers_, host, context)),
      states_(states_of(node, shape_, host, host_device)),
      decode_(designs_, *programs_.decode, buffers_, host) {
  for (const ProgramRecord* program : programs_.prefill)
    prefill_.emplace_back(designs_, *program, buffers_, host);
  for (const ProgramRecord* program : programs_.blocks)
    blocks_.emplace_back(designs_, *program, buffers_, host);
  const ProgramRecord& decode = *programs_.decode;
  try {
    check_layout(shape_, decode.context, decode.cache, buffers_.cache_bytes());
  } catch (const Error& error) {
    fail(designs_->artifacts().folder(), ": ", error.what(), "; build it again");
  }
  if (shape_.position_ids && !shape_.given_tables) rotary_ = rotary_of(node, shape_);
  if (shape_.all_logits) {
    Buffer& weights = *buffers_.find("weights");
    head_blocks_ = {.data = weights.bytes().data() + shape_.weight_bytes() - shape_.head().bytes(),
                    .type = DataType::kUInt8,
                    .shape = q4nx::blocks_shape(shape_.vocabulary, head_columns(), q4nx::kWide)};
    head_ = host_device.prepare(head_of(shape_.vocabulary, head_columns(), head_blocks_));
  }
  // The caches keep the designs alive, which keep the runtime.
  caches_ = std::make_shared<transformer::KvCaches>(
      shape_,
      [designs = designs_, shape = shape_, layout = decode.cache, bytes = buffers_.cache_bytes()] {
        return make_cache(designs->runtime(), shape, layout, bytes);
      });
}

DecoderLayers::Tokens DecoderLayers::tokens_of(std::span<const Tensor> inputs) const {
  transformer::check_call(shape_, inputs);
  const Shape& hidden = inputs[transformer::kHidden].shape;
  if (hidden[0] != 1) {
    throw Unsupported("expected one sequence, got a batch of " + std::to_string(hidden[0]) +
                      ": the NPU's designs compute one at a time; run the sequences one after the "
                      "other, or set the provider option on_unsupported to cpu");
  }
  Tokens tokens{transformer::tokens_of(shape_, inputs, 0), {}};
  const std::int64_t length = tokens.total();
  if (length > programs_.decode->context) {
    throw Unsupported("expected at most " + std::to_string(programs_.decode->context) +
                      " tokens, which the NPU's artifacts were built for, got " +
                      std::to_string(length) +
                      ": build them for a longer context (`flownpu build MODEL --context N`), or "
                      "set the provider option on_unsupported to cpu");
  }
  // The block numbers of the new tokens, without padding.
  if (shape_.attention().bidirectional_blocks)
    tokens.blocks = {
        inputs[transformer::kFirstPast + 2 * shape_.attentions()].as<const std::int32_t>(),
        static_cast<std::size_t>(tokens.count)};
  check_blocks(tokens);
  return tokens;
}

std::int64_t DecoderLayers::Tokens::block(std::int64_t token) const {
  return blocks.empty() ? 1 : tokens_of_block(blocks.subspan(static_cast<std::size_t>(token)));
}

void DecoderLayers::check_blocks(const Tokens& tokens) const {
  if (tokens.blocks.empty()) return;
  check_block_numbers(tokens.blocks, "", 0);
  for (std::int64_t token = 0; token < tokens.count;) {
    const std::int64_t block = tokens.block(token);
    const bool known = std::ranges::any_of(
        programs_.blocks, [&](const ProgramRecord* program) { return program->tokens == block; });
    if (block > 1 && !known) {
      const std::string sizes = list_of_tokens(programs_.blocks);
      unsupported("expected ", sizes.empty() ? "no images" : "images of " + sizes + " tokens",
                  ", which the NPU's artifacts were built for, got ", block,
                  " tokens that see one another from position ", tokens.past + token,
                  " on: give each image whole and apart from others, build the artifacts with "
                  "room for an image, or set the provider option on_unsupported to cpu");
    }
    token += block;
  }
}

void DecoderLayers::infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const {
  tokens_of(inputs);
  transformer::infer_outputs(shape_, inputs, outputs);
}

DecoderLayers::ProgramRun DecoderLayers::run_at(const Tokens& tokens, std::int64_t token) const {
  if (const std::int64_t block = tokens.block(token); block > 1) {
    const auto of_block = [&](const Program& program) { return program.record().tokens == block; };
    return {&*std::ranges::find_if(blocks_, of_block), block};
  }
  std::int64_t end = token;
  while (end < tokens.count - 1 && tokens.block(end) == 1) ++end;
  // The longest chunk that is worth its time for the tokens that are left: `fewest` takes the
  // shorter ones into account (aie/programs/chunks.py). If there is none, token by token.
  for (Program& chunk : prefill_ | std::views::reverse) {
    const ProgramRecord& record = chunk.record();
    if (end - token >= record.fewest && tokens.past + token + record.tokens <= record.context)
      return {&chunk, std::min(end - token, record.tokens)};
  }
  return {&decode_, 1};
}

void DecoderLayers::compute(const Tensor& hidden, const Tokens& tokens, Buffer& cache,
                            std::span<float> logits) const {
  const auto rows = [&](std::int64_t first, std::int64_t count) {
    return std::span<const float>(hidden.as<const float>() + first * shape_.hidden,
                                  static_cast<std::size_t>(count * shape_.hidden));
  };
  const std::int64_t last = tokens.count - 1;
  for (std::int64_t token = 0; token <= last;) {
    const std::int64_t position = tokens.past + token;
    const auto [program, count] = run_at(tokens, token);
    check_cancelled();
    program->write(rows(token, count));
    const std::string first = std::to_string(position);
    program->run(position,
                 count == 1 ? ", position " + first
                            : ", positions " + first + "-" + std::to_string(position + count - 1),
                 &cache);
    const auto made = [&](std::int64_t of, std::int64_t rows) {
      return logits.subspan(static_cast<std::size_t>(of * shape_.vocabulary),
                            static_cast<std::size_t>(rows * shape_.vocabulary));
    };
    if (shape_.all_logits && program != &decode_) multiply_head(*program, made(token, count));
    if (program == &decode_ && (shape_.all_logits || token == last))
      decode_.read(made(shape_.all_logits ? token : 0, 1));
    token += count;
    // A block may end with the last token, which also goes through the decode program.
    if (program != &decode_) token = std::min(token, last);
  }
}

std::int64_t DecoderLayers::head_columns() const {
  return wide_columns(shape_.hidden, shape_.head_eight_bits);
}

void DecoderLayers::multiply_head(const Program& chunk, std::span<float> logits) const {
  const auto tokens = static_cast<std::int64_t>(logits.size()) / shape_.vocabulary;
  std::vector<float> rows(static_cast<std::size_t>(tokens * shape_.hidden));
  chunk.read(rows);
  if (shape_.head_eight_bits) rows = for_planes(rows, shape_.hidden);
  const std::array inputs{Tensor{.data = rows.data(), .shape = Shape{tokens, head_columns()}},
                          head_blocks_};
  const Tensor output{.data = logits.data(), .shape = Shape{tokens, shape_.vocabulary}};
  const std::size_t bytes = head_->scratch_bytes(inputs);
  // Steps want their working memory aligned to 64 bytes.
  std::size_t space = bytes + 64;
  std::vector<std::byte> memory(space);
  void* scratch = memory.data();
  std::align(64, bytes, scratch, space);
  head_->run(inputs, std::span(&output, 1), {static_cast<std::byte*>(scratch), bytes});
}

void DecoderLayers::turn_from(std::int64_t row) const {
  if (row == first_row_) return;
  write_rotary(rotary_, shape_, row, *buffers_.find("rotary"));
  first_row_ = row;
}

void DecoderLayers::take_rows(std::span<const Tensor> tables, const Tokens& tokens) const {
  Buffer& rotary = *buffers_.find("rotary");
  const std::size_t table_bytes = rotary.bytes().size() / (tables.size() / 2);
  const std::size_t bytes = static_cast<std::size_t>(tokens.count) * shape_.angle_bytes();
  const std::int64_t turned = tables.front().shape[1];
  for (std::size_t table = 0; 2 * table < tables.size(); ++table) {
    const std::size_t begin =
        table * table_bytes + static_cast<std::size_t>(tokens.past) * shape_.angle_bytes();
    PackedWriter writer(rotary.bytes().subspan(begin, bytes));
    const std::int64_t first = (tokens.past + tokens.shift) * turned;
    const float* cosines = tables[2 * table].as<const float>() + first;
    const float* sines = tables[2 * table + 1].as<const float>() + first;
    for (std::int64_t token = 0; token < tokens.count; ++token)
      write_angles(cosines + token * turned, sines + token * turned, turned,
                   shape_.attention().head_size / 2, writer);
    rotary.to_device(begin, bytes);
  }
}

void DecoderLayers::run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
                        std::span<std::byte> /*scratch*/) const {
  const std::lock_guard lock(mutex_);
  designs_->begin_run();
  const Tokens tokens = tokens_of(inputs);
  const std::size_t parts = 2 * shape_.attentions();
  const auto pasts = inputs.subspan(transformer::kFirstPast, parts);
  const auto presents = outputs.subspan(transformer::kFirstPresent, parts);
  const std::shared_ptr<transformer::KvCache> cache =
      caches_->begin(pasts, presents, tokens.past, tokens.total());
  // All caches of this step are of that class.
  auto& memory = static_cast<ArrayCacheMemory&>(cache->memory());
  if (shape_.given_tables)
    take_rows(transformer::given_tables(shape_, inputs), tokens);
  else
    turn_from(tokens.shift);
  const Tensor& logits = outputs[transformer::kLogits];
  const std::span<float> all(logits.as<float>(), static_cast<std::size_t>(logits.shape.elements()));
  // Nobody may read the logits of padding, but they are to be numbers.
  if (shape_.all_logits)
    std::ranges::fill(all.subspan(static_cast<std::size_t>(tokens.count * shape_.vocabulary)), 0);
  const std::size_t of_states = transformer::count_of_state_inputs(shape_);
  if (experts_ != nullptr)
    experts_->use(inputs.first(inputs.size() - of_states).last(LayerExperts::inputs(shape_)));
  if (states_ != nullptr) {
    states_->begin(inputs.last(of_states), outputs.subspan(transformer::kFirstPresent + parts),
                   tokens.count);
  }
  compute(inputs[transformer::kHidden], tokens, memory.buffer(), all);
  if (states_ != nullptr) states_->finish();
  caches_->finish(*cache, presents, tokens.total());
}

std::string describe_decoder(const Node& node, const CompiledDesigns& designs) {
  const auto shape = transformer::Decoder::read(node);
  const DecoderPrograms programs = DecoderPrograms::find(designs.artifacts(), node);
  designs.artifacts().check(programs.all());
  const std::size_t dispatches = programs.decode->array_dispatches();
  const std::string chunks = list_of_tokens(programs.prefill);
  const std::string blocks = list_of_tokens(programs.blocks);
  const std::size_t states = shape.layers.size() - shape.attentions();
  return std::to_string(shape.layer_count()) + (shape.layer_count() == 1 ? " layer" : " layers") +
         (states == 0 ? "" : " (the states of " + std::to_string(states) + " on the host)") +
         " and the LM head in " + std::to_string(dispatches) +
         (dispatches == 1 ? " dispatch" : " dispatches") + " a token, " +
         (shape.all_logits ? "logits of all tokens, the chunks' by the host, " : "") +
         (chunks.empty() ? "prompts token by token" : "prompts in chunks of " + chunks) +
         (!shape.attention().bidirectional_blocks ? ""
          : blocks.empty()                        ? ", no images"
                                                  : ", images of " + blocks + " tokens");
}

}  // namespace flownpu::npu
