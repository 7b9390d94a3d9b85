// SPDX-License-Identifier: Apache-2.0
// A driver's matrices, tried on integers: weights of 0 to 15 and codes of -127 to 127, all scales
// 1, so that both kernels' sums are integers below 2^24 (times 256), and must be equal.
#include <array>
#include <bit>
#include <cstring>
#include <span>
#include <vector>

#include "ops/error.h"
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

}  // namespace

bool matrices_are_right(Context& context) {
  const ProductShape shape{.rows = kRows, .columns = kColumns, .result = Element::kFloat32};
  const std::optional<MatrixUnits>& units = context.facts().matrices;
  if (!units || !can_multiply(*units, shape, context.facts())) return false;
  const KernelDescription kernel = q4nx_matmul_of_matrices(shape, *units);
  const std::string key =
      context.identity() + "whether this is right:\n" + generate(kernel, context.dialect());
  if (const auto kept = context.cache().find(key); kept && kept->size() == 1)
    return kept->front() != 0;
  const bool is_right = computes_the_same(context, shape, kernel);
  context.cache().keep(key, {static_cast<unsigned char>(is_right)});
  return is_right;
}

std::vector<bool> ways_with_matrices(GpuMatrices wanted, const ProductShape& shape,
                                     Context& context) {
  const DeviceFacts& facts = context.facts();
  if (wanted == GpuMatrices::kOff) return {false};
  if (wanted == GpuMatrices::kAuto && facts.is_software()) return {false};
  const bool fits = facts.matrices && can_multiply(*facts.matrices, shape, facts);
  if (fits && matrices_are_right(context))
    return wanted == GpuMatrices::kOn ? std::vector{true} : std::vector{true, false};
  if (wanted == GpuMatrices::kAuto) return {false};
  const char* got = facts.matrices ? "some of other sizes than the kernels'" : "none";
  fail("[FlowNPU] device 'gpu': expected matrix units, which gpu_matrices = on asks for, got ",
       fits ? "some that compute wrong numbers" : got, " on ", facts.title(), " with ",
       context.api(), ": use gpu_matrices = auto");
}

}  // namespace flownpu::gpu
