// SPDX-License-Identifier: Apache-2.0
// The kernels of the CPU device. Each instruction set has a table of functions, made by compiling
// the sources of kernels/ once for each set. A device chooses its table once. Callers do not depend
// on the instruction set.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "ops/cpu/q4nx_rows.h"
#include "ops/nodes/kv_cache.h"
#include "ops/nodes/tensor.h"

namespace flownpu::cpu {

// Columns that share a scale in the panels' int8 activations: a part, which is 8 groups of a
// weight.
inline constexpr std::int64_t kPartColumns = 256;
inline constexpr std::int64_t kGroupsPerPart = kPartColumns / q4nx::kGroup;

// How int8 activations lie in memory, and what weights they are multiplied with.
enum class Int8Order : std::uint8_t {
  // Row after row, with a scale for each 32 columns: for weights as they are.
  kGroups,
  // Part after part (Int8Panels): for weights whose scales are multiples of a step.
  kPanels,
  // Row after row, with a scale for each 256 columns: for weights that are rounded to 8 bits.
  kParts,
};

// int8 activations of a few rows for Q4NX on AVX-512. All rows of one part of 256 columns lie
// together: x = scale * value.
struct Int8Panels {
  std::int64_t rows = 0;
  // [parts][rows][256]: four columns of a group and the same four of the next group in turn.
  std::int8_t* values = nullptr;
  // [parts][rows].
  float* scales = nullptr;
  // [parts][rows][8], for each group: the sum of the rounded x, and -8 times the sum of the values.
  float* sums = nullptr;
  std::int32_t* offsets = nullptr;
};

// Rows of activations, rounded once for all rows of blocks of a weight. K is padded with zeros to
// whole parts of 256, as in a weight's wide blocks.
struct RoundedActivations {
  // int8 only. In the order kPanels, `panels` has the activations, and the pointers below are null.
  Int8Order order = Int8Order::kGroups;
  Int8Panels panels;
  // bf16 [rows][padded_k], or int8 [rows][padded_k].
  const void* values = nullptr;
  // Columns that share a scale and a sum: 32, a group of the weight; for int8 also kPartColumns.
  std::int64_t part_columns = 32;
  // int8 only: f32 [rows][padded_k / part_columns], x = scale * value.
  const float* scales = nullptr;
  // f32 [rows][padded_k / part_columns]: the sum of the rounded x, which the minima multiply; of
  // unsigned values the lowest x, which multiplies the weights' sums.
  const float* sums = nullptr;
  // K padded to whole parts; its groups of 32 columns; and the groups that have any activation.
  // Products of many rows compute only these groups. Products of few rows wait for memory, and
  // compute all groups that the weight stores: reading the padding of wide blocks costs less than
  // skipping it.
  std::int64_t padded_k = 0;
  std::int64_t groups = 0;
  std::int64_t filled_groups = 0;
};

// A KV cache in blocks: key k of a sequence is row k % rows of the block table[k / rows].
struct CacheBlocks {
  const std::int32_t* table = nullptr;
  std::int64_t rows = 0;
  // From a block to the next in memory.
  std::int64_t block_bytes = 0;
};

// Attention of query rows that share a KV head over a range of KV rows, chunk by chunk of keys: the
// papers' eq. 6-11. What comes out is the state (m, l, Y), so that ranges can be merged.
struct AttentionSweep {
  // f32 [rows][head_size], already scaled by `scale`.
  const float* query = nullptr;
  std::int64_t rows = 0;
  std::int64_t head_size = 0;
  // Rows [0, keys) of the KV cache, `row_bytes` apart. A row has `head_size` elements and, if they
  // are int8, their scale. Without `blocks` nothing lies between them; with `blocks`, which only
  // attend_many takes, block 0 of the cache begins here.
  const void* key = nullptr;
  const void* value = nullptr;
  std::int64_t row_bytes = 0;
  const CacheBlocks* blocks = nullptr;
  DataType cache_type = DataType::kFloat32;
  std::int64_t keys = 0;
  // The position of key 0 in its sequence. attend_few_rows cuts the keys at multiples of a chunk,
  // so that a row's bits do not depend on other rows, which may see earlier keys.
  std::int64_t position = 0;
  // A multiple of chunk_keys: no row sees a key before it. For attend_many.
  std::int64_t begin = 0;
  // Row r sees keys [first_key[r], last_key[r]), both within [0, keys].
  const std::int32_t* first_key = nullptr;
  const std::int32_t* last_key = nullptr;
  // Optional additive bias, bias[r][key]; null if none.
  const float* const* bias = nullptr;
  // 0: none. Otherwise s = softcap * tanh(s / softcap).
  float softcap = 0;
  // L_c: keys of a chunk, a multiple of kAttentionKeyStep. For attend_many.
  std::int64_t chunk_keys = 0;
  // State: maximum and denominator f32 [rows]; numerator[r] is f32 [head_size].
  float* maximum = nullptr;
  float* denominator = nullptr;
  float* const* numerator = nullptr;
  // attention_scratch() bytes, 64-byte aligned. For attend_many.
  std::byte* scratch = nullptr;
};

// Chunks of keys are cut at multiples of this number. It is a multiple of the keys that any kernel
// takes together: a pair in bf16, or 16 in a tile of registers.
inline constexpr std::int64_t kAttentionKeyStep = 16;

// `row_blocks` rows of blocks (32 rows of the weight each) times `count` rows of activations from
// row `first` on: out[row_blocks][count][32] = dequantised weight . activations. `scratch` has
// kMatMulScratchBytes. All layouts of the blocks give the same bits.
using MatMulBlocks = void (*)(const Q4NXRows& weight, std::int64_t row_blocks,
                              const RoundedActivations& activations, std::int64_t first,
                              std::int64_t count, std::byte* scratch, float* out);

// Memory for 32 unpacked rows of a weight: 512 columns in bf16 or 1024 in int8, with the scales of
// 8-bit codes (1 KB). 32 KB is the L1 data cache of a Zen 4 core.
inline constexpr std::size_t kMatMulScratchBytes = 33 * 1024;

// The largest integer of an activation that is rounded to int8: 127, not 128, so that -x rounds to
// minus the integer of x.
inline constexpr int kLargestInt8 = 127;

// A weight W[k, m] (transposed: [m, k]) as a model's file stores it: f32, bf16, f16 or int8, dense,
// row by row. `scales`, f32 [m] or null, multiply its columns.
struct DenseWeight {
  const void* data = nullptr;
  DataType type = DataType::kFloat32;
  std::int64_t k = 0;
  std::int64_t m = 0;
  bool transposed = false;
  const float* scales = nullptr;
};

// Columns of k that share a scale in int8, of activations and of a dense weight: parts of k that
// are alike, and as long as they may be. Trained encoders have a few columns with large
// activations, which take bits from those that share their scale. In a simulation of a trained
// MiniLM's products on 29 texts the least cosine to f32 was 0.998 with 256 columns, 0.9993 with 128
// and 0.9997 with 32.
inline constexpr std::int64_t kDensePart = 128;

// The type in which a dense product multiplies: bf16 or int8 if the instruction set has dot
// products of that type, else f32 without rounding.
enum class DenseType : std::uint8_t { kFloat, kBFloat16, kInt8 };

struct DenseRounding {
  DenseType type = DenseType::kFloat;
  // int8 only: the largest integer of an activation, the most columns of a part, and whether
  // activations are from the least of a part upwards, for kernels that take them without a sign.
  int largest = 0;
  std::int64_t most_columns = 0;
  bool is_unsigned = false;

  // The columns of each part of k. Tiles of AMX take 64 at once.
  std::int64_t part_columns(std::int64_t k) const {
    constexpr std::int64_t kStep = 64;
    if (type != DenseType::kInt8) return q4nx::kGroup;
    const std::int64_t columns = std::max<std::int64_t>(k, 1);
    const std::int64_t parts = q4nx::ceil_div(columns, most_columns);
    return q4nx::ceil_div(q4nx::ceil_div(columns, parts), kStep) * kStep;
  }
};

// Columns of a dense weight that are packed together, and the columns of a product that a kernel
// makes at once.
inline constexpr std::int64_t kDenseColumns = 32;

// A function of one number.
enum class Function : std::uint8_t {
  kNone,  // x itself
  kAbs,
  kCos,
  kErf,
  kExp,
  kGelu,
  kGeluTanh,
  kLog,
  kNeg,
  kReciprocal,
  kRelu,
  kSigmoid,
  kSin,
  kSqrt,
  kTanh,
};

// The output of a product x W: y[rows, m] = activation(product + bias) + residual. Null: none.
struct ProductEpilogue {
  const float* bias = nullptr;
  // kNone, kGelu or kGeluTanh; of images kNone or kRelu.
  Function activation = Function::kNone;
  const float* residual = nullptr;
  float* y = nullptr;
  std::int64_t m = 0;
  // Whether y is written past the caches. That pays if y would have left them before it is read.
  bool streamed = false;
  // Images, if it is above 0: rows are pixels, `plane` of each image, from `first_pixel` on, and y
  // is [images][image_channels >= m][plane] = activation(product + bias + residual).
  std::int64_t plane = 0;
  std::int64_t image_channels = 0;
  std::int64_t first_pixel = 0;
};

// The constants of a SwiGLU that is more than silu(gate) * up.
struct SwigluScale {
  float alpha = 1;
  float beta = 0;
  float limit = std::numeric_limits<float>::infinity();
};

// Most columns of a state that a kernel holds in the first cache.
inline constexpr std::int64_t kRecurrenceColumns = 64;

// Linear attention of a sequence's tokens with one state S f32 [key_size][value_size] (ONNX
// LinearAttention), for each token:
//   S <- diag(decay) S + key change^T, output = scale S^T query
// where change is value, or, by the delta rule, beta (value - (diag(decay) S)^T key).
// Rows of keys, values, queries and outputs are `.._stride` floats apart.
struct Recurrence {
  // Null: zeros. `present` may be the same memory.
  const float* past = nullptr;
  float* present = nullptr;
  std::int64_t key_size = 0;
  std::int64_t value_size = 0;
  std::int64_t tokens = 0;
  const float* key = nullptr;
  std::int64_t key_stride = 0;
  const float* value = nullptr;
  std::int64_t value_stride = 0;
  // Factors of the state f32 [tokens][decays]: one, or key_size for its rows.
  const float* decay = nullptr;
  std::int64_t decays = 1;
  // Null: not the delta rule.
  const float* beta = nullptr;
  std::int64_t beta_stride = 0;
  float scale = 1;
  // Queries that share the state lie next to each other, and so do their outputs; at least one.
  std::int64_t queries = 1;
  const float* query = nullptr;
  std::int64_t query_stride = 0;
  float* output = nullptr;
  std::int64_t output_stride = 0;
  // Memory for f32 [key_size][kRecurrenceColumns], 64-byte aligned.
  float* strip = nullptr;
};

// A token of a depthwise convolution: y[c] = bias[c] + sum_tap weight[tap][c] x[tap][c], and of
// that, with `is_silu`, y sigmoid(y).
struct ConvolvedToken {
  // The tokens under each tap.
  const float* const* x = nullptr;
  const float* weight = nullptr;
  std::int64_t weight_stride = 0;
  std::int64_t taps = 0;
  // May be null.
  const float* bias = nullptr;
  bool is_silu = false;
  float* y = nullptr;
  std::int64_t channels = 0;
};

// The transforms of convolutions by tiles (images/winograd.h).
struct WinogradTransforms {
  // The pixels of a tile, each a pointer to its channels, become as many rows of `padded` elements,
  // f32 or rounded to bf16, `stride` elements apart; those past the last channel are zero.
  void (*input)(const float* const* pixels, std::int64_t channels, std::int64_t padded, bool rounds,
                void* to, std::int64_t stride);
  // As many products f32 [tiles][32], `stride` floats apart, become two lines [2 tiles][32] of
  // pixels.
  void (*output)(const float* products, std::int64_t stride, std::int64_t tiles, float* lines);
};

struct Kernels {
  // On x86 "amx", "avx512", "avx2", "generic"; on Arm "i8mm", "dotprod", "generic". The first two
  // of each give the same bits, but for attend_many of 64 and more rows on AMX.
  const char* isa;
  // The fewest rows of a prompt whose products with 4-bit weights are made by tiles; 0 without
  // tiles.
  std::int64_t fewest_tile_rows = 0;

  // One row x[k] -> bf16 values[padded_k] (round to nearest even) and sums[groups].
  void (*round_to_bf16)(const float* x, std::int64_t k, std::int64_t padded_k, void* values,
                        float* sums);
  // One row x[k] -> int8 values[padded_k], with the scale max|x| / largest and the sum of each
  // part.
  void (*round_to_int8)(const float* x, std::int64_t k, std::int64_t padded_k,
                        std::int64_t part_columns, int largest, void* values, float* scales,
                        float* sums);
  // The same, x = lowest + scale * value with values from 0 to `largest`, which is at most 255; and
  // the lowest x of each part. Null for an instruction set whose products do not take them.
  void (*round_to_unsigned)(const float* x, std::int64_t k, std::int64_t padded_k,
                            std::int64_t part_columns, int largest, void* values, float* scales,
                            float* lowest);
  // The order in which matmul_int8 takes activations of `rows` rows in all for a weight of that
  // layout. round_to_panels rounds one row x[k] as the row `row`; it is null for an instruction set
  // without panels.
  Int8Order (*int8_order)(std::int64_t rows, const q4nx::Layout& layout);
  void (*round_to_panels)(const float* x, std::int64_t k, std::int64_t parts, std::int64_t row,
                          const Int8Panels& panels);
  MatMulBlocks matmul_bf16;
  MatMulBlocks matmul_int8;
  // Applies the epilogue to product[blocks][count][32]. The product is rows `first` .. and columns
  // `column` .. of y; columns beyond the last of y are left out.
  void (*finish_product)(const float* product, std::int64_t blocks, std::int64_t first,
                         std::int64_t count, std::int64_t column, const ProductEpilogue& epilogue);

  // The type to which products of many rows round: kFloat without dot products. `int8`: whether
  // activations may be int8. `weight`: the type of the weight.
  DenseRounding (*dense_rounding)(bool int8, DataType weight);
  // 32 columns of a dense weight, from column 32 * block on, in the order in which matmul_dense
  // reads them: dense_block_bytes(k) bytes, 64-byte aligned. Columns past the last are zero.
  std::int64_t (*dense_block_bytes)(std::int64_t k, const DenseRounding& rounding);
  void (*pack_dense)(const DenseWeight& weight, std::int64_t block, const DenseRounding& rounding,
                     std::byte* packed);
  // `count` rows of activations from row `first` on times 32 packed columns, of which the first
  // `columns` are needed: out[count][32]. For kFloat `values` are the activations, f32
  // [rows][padded_k = k].
  void (*matmul_dense)(const std::byte* packed, DenseType type,
                       const RoundedActivations& activations, std::int64_t first,
                       std::int64_t count, std::int64_t columns, float* out);
  // `count` rows x[count][k] times columns [begin, end) of a weight as it lies, in f32, nothing
  // rounded: out[blocks of 32 columns, from `begin` on][count][32]. `begin` is a multiple of 32
  // unless the weight is transposed. The bits do not depend on `begin`, `end` and `count`.
  void (*dense_rows)(const DenseWeight& weight, const float* x, std::int64_t count,
                     std::int64_t begin, std::int64_t end, float* out);
  // Pixels of planes f32 [channels][plane] as rows [pixels][channels], f32 or rounded to bf16.
  void (*channels_last)(const float* planes, std::int64_t plane, std::int64_t channels,
                        std::int64_t pixels, bool rounds, void* to);
  // Winograd's F(2 x 2, 3 x 3), tiles of 4 x 4 pixels; and tiles of 3 x 3.
  WinogradTransforms winograd;
  WinogradTransforms winograd_of_upsampled;
  // One row `row` < 32 of a row of blocks, dequantised: out[k].
  void (*dequantize_row)(const Q4NXRows& weight, std::int64_t row, std::int64_t k, float* out);

  // y = gelu_tanh(gate) * up and y = silu(gate) * up, n elements.
  void (*geglu)(const float* gate, const float* up, float* y, std::int64_t n);
  void (*swiglu)(const float* gate, const float* up, float* y, std::int64_t n);
  // y = g sigmoid(alpha g) (u + beta), with g = min(gate, limit), u = max(-limit, min(up, limit)).
  void (*scaled_swiglu)(const float* gate, const float* up, const SwigluScale& scale, float* y,
                        std::int64_t n);

  // y = x / sqrt(mean(x^2) + epsilon) * weight, over n elements; weight may be null (ones). In
  // place is allowed.
  void (*rms_norm)(const float* x, const float* weight, float epsilon, float* y, std::int64_t n);
  // y = (x - mean) / sqrt(variance + epsilon) * weight + bias, over n elements; bias may be null.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float epsilon,
                     float* y, std::int64_t n);
  // The norm of a group of channels x[channels][pixels]: y = (x - mean) / sqrt(variance +
  // epsilon) * weight[channel] + bias[channel], over all elements, and of that, with `is_silu`, y
  // sigmoid(y). In place is allowed.
  void (*group_norm)(const float* x, const float* weight, const float* bias, float epsilon,
                     bool is_silu, float* y, std::int64_t channels, std::int64_t pixels);
  // y = x / scale rounded to the nearest (halves to even) + zero, saturated to int8 or uint8; and y
  // = (x - zero) * scale for such x. n elements.
  void (*quantize)(const float* x, std::int64_t n, float scale, int zero, bool is_signed, void* y);
  void (*dequantize)(const void* x, std::int64_t n, float scale, int zero, bool is_signed,
                     float* y);
  // y = function(x), n elements. In place is allowed.
  void (*apply)(Function function, const float* x, float* y, std::int64_t n);
  // The sum, the largest and the smallest of n elements; NaN if one is. Sums are in double.
  double (*sum)(const float* x, std::int64_t n);
  float (*largest)(const float* x, std::int64_t n);
  float (*smallest)(const float* x, std::int64_t n);
  // totals += x, n elements.
  void (*add_to_totals)(const float* x, double* totals, std::int64_t n);
  // y = exp(x - max x) / sum exp(x - max x), n elements. In place is allowed.
  void (*softmax)(const float* x, float* y, std::int64_t n);
  // sum = x + skip, n elements.
  void (*add)(const float* x, const float* skip, float* sum, std::int64_t n);

  // sum += factor * x, n elements.
  void (*add_scaled)(const float* x, float factor, float* sum, std::int64_t n);

  void (*convolve_token)(const ConvolvedToken& call);
  void (*recurrence)(const Recurrence& call);

  // Rotates the halves (interleaved: the pairs) of x[2 * half] by the angles whose cosines and
  // sines are given.
  void (*rope)(float* x, const float* cos, const float* sin, std::int64_t half, bool interleaved);
  // f32 -> a KV cache's type, n elements; to int8 a whole row, with its scale behind them.
  void (*store_cache)(const float* x, void* out, DataType type, std::int64_t n);
  // float16 or bfloat16 -> f32, n elements.
  void (*widen)(const void* x, DataType type, float* y, std::int64_t n);

  // Attention with head elements in the lanes: for up to `few_rows` rows, where reading K and V
  // takes the time.
  void (*attend_few_rows)(const AttentionSweep& sweep);
  // Attention with query rows in the lanes, `block_rows` at a time, for any number of rows. The
  // bits of a row's state depend on its query, its keys and chunk_keys. They do not depend on other
  // rows, `keys` or `begin`.
  void (*attend_many)(const AttentionSweep& sweep);
  // Bytes of AttentionSweep::scratch.
  std::int64_t (*attention_scratch)(std::int64_t rows, std::int64_t head_size, DataType cache_type,
                                    std::int64_t chunk_keys);
  // Bytes of an element that attend_many multiplies.
  std::int64_t (*attention_element)(std::int64_t head_size, DataType cache_type);
  std::int64_t few_rows;
  std::int64_t block_rows;
};

// The tables that this library contains and this processor can run, fastest first; the last is
// "generic".
std::vector<const Kernels*> available_kernels();
// "auto" or the name of one. Throws Error that lists the available ones.
const Kernels& select_kernels(std::string_view isa);

}  // namespace flownpu::cpu
