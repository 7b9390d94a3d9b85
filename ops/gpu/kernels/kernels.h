// SPDX-License-Identifier: Apache-2.0
// The kernels, each with the rule for its grid. A kernel's source contains sizes. Rows, tokens and
// lengths are parameters, so that a new prompt or token needs no compilation. All arithmetic is in
// float, in an order that depends on the sizes only. Unless another type is named, tensors are
// float32, or the type of activations (Element::kActivation).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ops/device.h"
#include "ops/formats/q4nx.h"
#include "ops/gpu/context/context.h"
#include "ops/gpu/language/kernel.h"

namespace flownpu::gpu {

enum class Gating : std::uint8_t { kNone, kGeGlu, kSwiGlu };

struct NormShape {
  std::int64_t columns = 0;
  float epsilon = 0;
  // Three choices: whether a residual (skip) is added first, whether the residual is normalised
  // before, and whether the sum is written.
  bool has_skip = false;
  bool norms_skip = false;
  bool writes_sum = false;
};

// A product whose weight has those of all experts of a mixture, one below the other. Rows of y are
// choices: `share` of them follow one another that read the same row of x. gate and up get a bias
// before they are joined, and with SwiGLU the result is
//     g sigmoid(alpha g) (u + beta), g = min(gate, limit), u = max(-limit, min(up, limit))
// (OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card").
struct ExpertsShape {
  std::int64_t count = 0;
  std::int64_t share = 1;
  bool has_bias = false;
  float alpha = 1;
  float beta = 0;
  float limit = 0;  // 0: none

  bool is_special() const { return alpha != 1 || beta != 0 || limit > 0; }
};

// A product with a Q4NX weight of `rows` x `columns`: `rows` results of `columns` inputs. With
// gating the weight has two such parts: the gate's rows of blocks, and below them the up
// projection's.
struct ProductShape {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  q4nx::Layout layout = q4nx::kNarrow;
  Gating gating = Gating::kNone;
  float factor = 1;  // of the product, before anything is added
  bool has_bias = false;
  bool has_residual = false;
  // fused_dqp: whether x is normalised first, each work-group for itself; x is then float32.
  std::optional<NormShape> norm = std::nullopt;
  Element given = Element::kActivation;                // of x; or float32
  Element result = Element::kActivation;               // of y; or float32
  Storage storage = Storage::kBuffer;                  // of the weight
  std::optional<ExpertsShape> experts = std::nullopt;  // not with a norm
  // Teams of lanes of a work-group of fused_dqp, which share the columns.
  std::int64_t teams = 1;
};

// The numbers of teams, of 1, 2 and 4, that the device has room for. The rule's number comes first:
// it is larger for a product of few rows, so that all compute units have work.
std::vector<std::int64_t> teams_for(const ProductShape& shape, const DeviceFacts& facts);

// The kinds of storage for a weight of so many bytes, the default first; a faster measured one
// replaces it. Throws Error if `wanted` is an image, and the device has none of that size.
std::vector<Storage> storages_for(GpuWeights wanted, std::size_t bytes, const DeviceFacts& facts);

// FusedDQP: y[t] = dequant(w) . x[t], where the weight is read anew for each row t. Arguments: x
// [t, columns], w, y [t, rows], then, if the shape has them, the norm's weight, skip [t, columns],
// the skip's norm weight and sum, as in rms_norm; of experts, chosen int32 [t], and their bias
// [experts, 2 rows]; bias [rows] and residual [t, rows].
KernelDescription fused_dqp(const ProductShape& shape);
Grid fused_dqp_grid(const ProductShape& shape, std::int64_t tokens);

// Rounds rows to int8, with a scale for each group of 32 columns, and adds up each group's
// integers. Arguments: x [t, columns], codes int8 [t, 32 groups], scales and sums float32 [t,
// groups].
KernelDescription quantize_rows(std::int64_t columns, Element given = Element::kActivation);
Grid quantize_rows_grid(std::int64_t columns, std::int64_t tokens);

// Q4NXMatMul of rows that quantize_rows rounded: dot products of integers, scaled group by group.
// Arguments: codes, scales, sums, w, y, of experts, order and tiles as sort_by_expert writes them
// (experts/kernels.h) for kMatmulTile, and their bias; then bias and residual as in fused_dqp;
// parameter: tokens. With experts the grid is of as many tokens as the tiles hold.
inline constexpr std::int64_t kMatmulTile = 32;  // tokens of a work-group
KernelDescription q4nx_matmul(const ProductShape& shape);
Grid q4nx_matmul_grid(const ProductShape& shape, std::int64_t tokens);

enum class DenseActivation : std::uint8_t { kNone, kGelu, kGeluTanh };

// A product with a weight that is not in blocks: `rows` results of `columns` inputs. W is [columns,
// rows], or if it is transposed [rows, columns].
struct DenseShape {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  Element given = Element::kFloat32;   // of x, bias, residual and y; or float16, bfloat16
  Element weight = Element::kFloat32;  // or float16, bfloat16, int8
  bool transposed = false;
  bool has_scale = false;
  bool has_bias = false;
  DenseActivation activation = DenseActivation::kNone;
  bool has_residual = false;
};

// DenseMatMul: y[t] = activation((x[t] . W) scale + bias) + residual[t % residual_rows]. Arguments:
// x [t, columns], W, y [t, rows], then, if the shape has them, scale and bias [rows] and residual
// [residual_rows, rows]; parameters: tokens, rows, columns, and with a residual residual_rows.
KernelDescription dense_matmul(const DenseShape& shape);
Grid dense_matmul_grid(const DenseShape& shape, std::int64_t tokens);

// y[i] = a[i % batches_a] . b[i % batches_b]. Arguments: a [batches_a, rows, depth], b [batches_b,
// depth, columns], y [batches, rows, columns]; parameters: rows, depth, columns, batches_a,
// batches_b.
KernelDescription activations_matmul(Element element);
Grid activations_matmul_grid(std::int64_t rows, std::int64_t columns, std::int64_t batches);

// Q4NXGather: y[i] = dequant(w)[indices[i]]. Arguments: w, indices int32 [i], y [i, columns].
KernelDescription q4nx_gather(std::int64_t rows, std::int64_t columns, const q4nx::Layout& layout);
Grid q4nx_gather_grid(std::int64_t columns, std::int64_t count);

// RMS norm of rows: y = weight x / sqrt(mean(x^2) + epsilon). Arguments: x [t, columns], weight
// [columns], y [t, columns], then, if the shape has them, skip [skips, columns], the skip's norm
// weight [columns], and sum [t, columns]; parameter, with a skip: skips, the rows of it, which are
// repeated.
KernelDescription rms_norm(const NormShape& shape);
Grid rms_norm_grid(std::int64_t columns, std::int64_t rows);

struct LayerNormShape {
  Element given = Element::kFloat32;  // of all tensors
  float epsilon = 0;
  bool has_shift = true;
  bool is_silu = false;
};

// y = (x - mean) / sqrt(variance + epsilon) scale + shift, of rows of `columns` elements, and SiLU
// of it. The scale's and shift's first of a row is number (row % groups) (columns / pixels), and
// each is for `pixels` elements. Arguments: x [rows, columns], scale, y [rows, columns], shift if
// there is one; parameters: columns, groups, pixels. The grid is a work-group a row.
KernelDescription layer_norm(const LayerNormShape& shape);

// exp(x) over its sum along rows. Arguments: x and y [rows, columns]; parameter: columns. The grid
// is a work-group a row.
KernelDescription softmax(Element given);

struct ElementwiseShape {
  // The types of the operands a, b, ... and of the result.
  std::vector<Element> operands;
  Element result = Element::kFloat32;
  std::int64_t axes = 1;
  // An expression of them, and of args.alpha.
  std::string code = "a";
  float alpha = 0;
};

// y = code at each place of a view. Arguments: the operands, y; parameters: the number of places,
// for each axis its size, the innermost first, then for each operand and y its offset and for each
// axis its step.
KernelDescription elementwise(const ElementwiseShape& shape);
Grid elementwise_grid(std::int64_t count);

struct RotationShape {
  std::int64_t width = 0;  // of a row: heads x head_size
  std::int64_t head_size = 0;
  std::int64_t half = 0;  // the first 2 * half elements of a head are rotated
  bool interleaved = false;
};

// Rotates heads by positions (RoPE). Arguments: x [t, width], positions int32 [t], cos and sin [p,
// half], y [t, width].
KernelDescription rotary_embedding(const RotationShape& shape);
Grid rotary_embedding_grid(const RotationShape& shape, std::int64_t tokens);

struct HeadsShape {
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_size = 0;         // even
  Element cache = Element::kFloat32;  // or float16, bfloat16, int8 rows
  float scale = 1;                    // of queries
  bool qk_norm = false;
  float epsilon = 0;
  std::int64_t rotated = 0;  // the first elements of a head, which are rotated; 0: all
  bool is_paged = false;     // as in AttentionShape

  std::int64_t half() const { return (rotated > 0 ? rotated : head_size) / 2; }
};

// The kernel after a packed QKV projection, for one sequence: queries and keys are normalised, if
// `qk_norm`, and rotated; queries are scaled; keys and values are appended to a cache. Arguments:
// packed [t, (heads + 2 kv_heads) head_size], cos and sin [p, half()], query [t, heads
// head_size], key and value cache [kv_heads, capacity, head_size], then with qk_norm the weights
// [head_size] for queries and for keys; parameters: first (the sequence's first row of t), past
// (the position of that row), turn (its row of cos and sin), capacity; with is_paged those of
// pages.
KernelDescription append_heads(const HeadsShape& shape);
Grid append_heads_grid(const HeadsShape& shape, std::int64_t tokens);

struct AttentionShape {
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_size = 0;
  Element cache = Element::kFloat32;
  float softcap = 0;
  bool causal = true;
  // The tokens are rows of one sequence among those of others, and its cache begins at position 0.
  bool one_sequence = false;
  // Tokens of a block see one another. Needs one_sequence; a causal token then sees further.
  bool has_blocks = false;
  // Needs one_sequence and one token. Several work-groups share the token's keys, and
  // merge_attention joins their sums.
  bool has_parts = false;
  // Needs one_sequence and one token, whose packed QKV projection is given in the place of its
  // query: the kernel does what append_heads does, too.
  bool appends = false;
  bool qk_norm = false;
  float epsilon = 0;
  std::int64_t rotated = 0;  // as in HeadsShape
  // Several tokens of a prompt share a work-group, which reads keys and values once for them.
  bool in_tiles = false;
  // All keys are given with the queries, all tensors by head or by token and of the type `cache`.
  bool is_whole = false;
  bool by_head = false;
  float scale = 1;  // of queries
  // Numbers that are added to scores, or as int8 whether a key is seen. Not with one_sequence.
  bool has_mask = false;
  Element mask = Element::kFloat32;
  // Rows of the cache are in pages, its capacity is that of all pages, and a table names those of
  // each sequence (ops/definitions/paged_attention.py). Needs one_sequence.
  bool is_paged = false;
  // A head has a sink, a score without a value in its softmax (gpt-oss; Xiao et al., Efficient
  // Streaming Language Models with Attention Sinks). Not with is_whole.
  bool has_sinks = false;
  // Work-items of a work-group, a power of two, at least 64: attention_lanes().
  std::int64_t lanes = 256;

  std::int64_t heads_per_group() const { return heads / kv_heads; }
  std::int64_t half() const { return (rotated > 0 ? rotated : head_size) / 2; }
};

// Attention of a token's heads. A work-group has up to 8 heads of one KV head, reads its keys and
// values once, and computes an online softmax over chunks of them. Arguments: query [b, t, heads
// head_size], scaled; key and value [b, kv_heads, capacity, head_size]; rows int32 [b, 3] (tokens
// before, tokens of the call, the position of the first row of the cache); y [b, t, heads
// head_size]. Parameters: tokens, capacity, window (0: none; not a constant, so that a model's
// layers share their kernels). Tokens that are padding get zeros.
// With one_sequence b is 1, there are no rows, and two parameters precede these: first (the
// sequence's first row of t) and before (that row's position). With has_blocks there is ends int32
// [t] before y: how many of the call's tokens, from `first` on, a token sees. With has_parts it
// writes sums [parts, heads head_size] in the place of y, and after them states [parts, heads, 2],
// maximum and denominator; the last parameter is parts, which is also the grid's third axis
// (`batch`). With appends the first argument is packed [t, (heads + 2 kv_heads) head_size], not
// scaled, and behind the others are cos and sin [p, half()], the key and value cache once
// more, to write to, and with qk_norm the weights [head_size] for queries and for keys; behind
// the other parameters is turn, the token's row of cos and sin. With is_whole the arguments are
// query, key, value and y, [b, heads, t, head_size] or [b, t, heads head_size], and the parameters
// tokens, capacity, which is the number of keys, and window. A mask [b, heads, t, keys], whose four
// sizes, each of which may be 1, are the last parameters, and sinks [heads] come last. With
// is_paged there are, behind all others, pages int32 [sequences, columns], of each sequence, and
// the parameters sequence (its row of these), columns and page (rows of one).
KernelDescription flow_attention(const AttentionShape& shape);
Grid flow_attention_grid(const AttentionShape& shape, std::int64_t batch, std::int64_t tokens);
// Merges the parts. Arguments: sums and states, as above, y [t, heads head_size], then sinks;
// parameters: first (the row of y to write), parts.
KernelDescription merge_attention(const AttentionShape& shape);
Grid merge_attention_grid(const AttentionShape& shape);
// The most bytes of a work-group's own memory that flow_attention takes, in tiles or not.
std::int64_t flow_attention_memory(const AttentionShape& shape);
// The most lanes of a shape that the device has room for: 256, 128 or 64.
std::int64_t attention_lanes(const DeviceFacts& facts);

// The index of the largest element of each row, of equal ones the first. As on the CPU, NaN is the
// largest if it is the first element, and is passed over elsewhere. Arguments: x [t, columns], y
// int32 [t]. The grid is a work-group a row.
KernelDescription argmax(std::int64_t columns);

}  // namespace flownpu::gpu
