// SPDX-License-Identifier: Apache-2.0
// A driver's matrices, tried on integers, with which kernels with and without them are exact, so
// that both must be equal. Products: weights of 0 to 15 and codes of -127 to 127, all scales 1, so
// that sums are integers below 2^24 (times 256). Attention: scores are multiples of 128, so that
// the largest has a weight of 1 and all others, whose exp is below float's least number, 0.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <functional>
#include <span>
#include <vector>

#include "ops/error.h"
#include "ops/gpu/kernels/matrices/flow_attention.h"
#include "ops/gpu/kernels/matrices/q4nx_matmul.h"
#include "ops/gpu/language/generate.h"

namespace flownpu::gpu {
namespace {

// Sizes that are no multiples of a tile, or of a step.
constexpr std::int64_t kRows = 77;
constexpr std::int64_t kColumns = 96;
constexpr std::int64_t kTokens = 70;
constexpr std::uint8_t kUpperByteOfOne = 0x3f;  // of 1 in bf16, 0x3f80
constexpr std::uint8_t kLowerByteOfOne = 0x80;

std::vector<std::uint8_t> blocks_of_integers() {
  constexpr q4nx::Layout kLayout = q4nx::kNarrow;
  const auto size = static_cast<std::size_t>(kLayout.block_bytes());
  const auto scales = static_cast<std::size_t>(kLayout.minimum_offset());
  const auto codes = static_cast<std::size_t>(kLayout.code_offset());
  std::vector<std::uint8_t> blocks(
      size * static_cast<std::size_t>(q4nx::row_blocks(kRows) * q4nx::groups_of(kColumns)));
  std::uint32_t state = 1;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    state = state * 1664525U + 1013904223U;  // Numerical Recipes' generator
    const std::size_t place = i % size;
    if (place < scales) blocks[i] = place % 2 == 0 ? kLowerByteOfOne : kUpperByteOfOne;
    if (place >= codes) blocks[i] = static_cast<std::uint8_t>(state >> 24U);
  }
  return blocks;
}

template <typename Number>
Buffer written(Context& context, const std::vector<Number>& content) {
  Buffer buffer = context.allocate(content.size() * sizeof(Number));
  context.write(buffer, std::as_bytes(std::span(content)));
  return buffer;
}

bool computes_the_same(Context& context, const ProductShape& shape,
                       const KernelDescription& kernel) {
  const std::int64_t groups = q4nx::groups_of(kColumns);
  std::vector<std::int8_t> codes(static_cast<std::size_t>(kTokens * kColumns));
  for (std::size_t i = 0; i < codes.size(); ++i)
    codes[i] = static_cast<std::int8_t>(static_cast<int>(i * i * 31 % 255) - 127);
  const std::vector<float> ones(static_cast<std::size_t>(kTokens * groups), 1.0F);
  std::vector<float> found[2]{std::vector<float>(static_cast<std::size_t>(kTokens * kRows)), {}};
  found[1] = found[0];
  const Buffer x = written(context, codes);
  const Buffer scales = written(context, ones);
  const Buffer w = written(context, blocks_of_integers());
  for (int which = 0; which < 2; ++which) {
    const Buffer y = written(context, found[which]);
    // The weight's minima are 0, so that sums count for nothing.
    const std::array<KernelArgument, 6> arguments{&x, &scales, &scales,
                                                  &w, &y,      static_cast<std::int32_t>(kTokens)};
    context.launch(*context.compile(which == 0 ? q4nx_matmul(shape) : kernel), arguments,
                   which == 0 ? q4nx_matmul_grid(shape, kTokens)
                              : q4nx_matmul_of_matrices_grid(shape, kTokens));
    context.read(y, std::as_writable_bytes(std::span(found[which])));
  }
  return std::memcmp(found[0].data(), found[1].data(), found[0].size() * sizeof(float)) == 0;
}

// The given shape's heads with tokens of more than one tile, behind others, so that keys are more
// than two chunks; the last of both is not full.
bool attends_the_same(Context& context, const AttentionShape& shape, const MatrixUnits& units) {
  constexpr std::int64_t kPast = 37;
  constexpr std::int64_t kNew = 45;
  constexpr std::int64_t kKeys = kPast + kNew;
  // `count` multiples of `step`, from -most to most times it.
  const auto integers = [](std::int64_t count, int most, float step) {
    std::vector<float> made(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < made.size(); ++i)
      made[i] =
          step * static_cast<float>(static_cast<int>(i * i * 31 % 1021) % (2 * most + 1) - most);
    return made;
  };
  const std::int64_t cached = shape.kv_heads * kKeys * shape.head_size;
  const std::int64_t given = kNew * shape.heads * shape.head_size;
  const Buffer query = written(context, integers(given, 3, 16));
  const Buffer keys = written(context, integers(cached, 2, 8));
  const Buffer values = written(context, integers(cached, 100, 1));
  std::vector<float> found[2];
  for (std::vector<float>& one : found) {
    one.resize(static_cast<std::size_t>(given));
    const bool in_matrices = &one == &found[1];
    const Buffer y = written(context, one);
    std::vector<KernelArgument> arguments{&query, &keys, &values, &y};
    for (const std::int64_t number : {std::int64_t{0}, kPast, kNew, kKeys, std::int64_t{0}})
      arguments.emplace_back(static_cast<std::int32_t>(number));
    context.launch(*context.compile(in_matrices ? flow_attention_of_matrices(shape, units)
                                                : flow_attention(shape)),
                   arguments,
                   in_matrices ? flow_attention_of_matrices_grid(shape, units, 1, kNew)
                               : flow_attention_grid(shape, 1, kNew));
    context.read(y, std::as_writable_bytes(std::span(one)));
  }
  return std::ranges::equal(found[0], found[1]);
}

// Whether the kernel computes the right numbers: `compute` is asked once for each driver.
bool is_right(Context& context, const KernelDescription& kernel,
              const std::function<bool()>& compute) {
  const std::string key =
      context.identity() + "whether this is right:\n" + generate(kernel, context.dialect());
  if (const auto kept = context.cache().find(key); kept && kept->size() == 1)
    return kept->front() != 0;
  const bool found = compute();
  context.cache().keep(key, {static_cast<unsigned char>(found)});
  return found;
}

bool multiplies_right(Context& context) {
  const ProductShape shape{.rows = kRows, .columns = kColumns, .result = Element::kFloat32};
  const KernelDescription kernel = q4nx_matmul_of_matrices(shape, context.facts().matrix_units());
  return is_right(context, kernel, [&] { return computes_the_same(context, shape, kernel); });
}

// With the heads' size and number to a KV head, on which the kernel's tiles depend.
bool attends_right(Context& context, const AttentionShape& attended) {
  constexpr std::int64_t kKvHeads = 2;
  const AttentionShape shape{.heads = kKvHeads * attended.heads_per_group(),
                             .kv_heads = kKvHeads,
                             .head_size = attended.head_size,
                             .one_sequence = true,
                             .in_tiles = true,
                             .lanes = attended.lanes};
  const MatrixUnits& units = context.facts().matrix_units();
  return is_right(context, flow_attention_of_matrices(shape, units),
                  [&] { return attends_the_same(context, shape, units); });
}

[[noreturn]] void refuse(const Context& context, const std::string& got) {
  fail("[FlowNPU] device 'gpu': expected matrix units, which gpu_matrices = on asks for, got ", got,
       " on ", context.facts().title(), " with ", context.api(), ": use gpu_matrices = auto");
}

// `fits`: whether the device has units of a size that the kernel takes.
std::vector<bool> ways_of(GpuMatrices wanted, bool fits, const Context& context,
                          const std::function<bool()>& right) {
  const bool is_left_out = wanted == GpuMatrices::kAuto && context.facts().is_software();
  if (!fits || wanted == GpuMatrices::kOff || is_left_out) return {false};
  if (right()) return wanted == GpuMatrices::kOn ? std::vector{true} : std::vector{true, false};
  if (wanted == GpuMatrices::kAuto) return {false};
  refuse(context, "some that compute wrong numbers");
}

}  // namespace

std::vector<bool> ways_with_matrices(GpuMatrices wanted, const ProductShape& shape,
                                     Context& context) {
  const DeviceFacts& facts = context.facts();
  const bool fits = facts.matrices && can_multiply(*facts.matrices, shape, facts);
  if (wanted == GpuMatrices::kOn && !fits)
    refuse(context, facts.matrices ? "some of other sizes than the kernels'" : "none");
  return ways_of(wanted, fits, context, [&] { return multiplies_right(context); });
}

std::vector<bool> ways_with_matrices(GpuMatrices wanted, const AttentionShape& shape,
                                     Context& context) {
  const DeviceFacts& facts = context.facts();
  if (wanted == GpuMatrices::kOn && !facts.matrices) refuse(context, "none");
  const bool fits = facts.matrices && can_attend(*facts.matrices, shape, facts);
  return ways_of(wanted, fits, context, [&] { return attends_right(context, shape); });
}

}  // namespace flownpu::gpu
