// SPDX-License-Identifier: Apache-2.0
// Pieces of kernels: texts, and the frame of products whose factors are read element by element:
// DenseMatMul, the product of two activations, convolution.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "ops/gpu/kernels/kernels.h"

namespace flownpu::gpu {

// `text` with `word` replaced everywhere.
inline std::string replaced(std::string text, const std::string& word, const std::string& by) {
  for (std::size_t at = text.find(word); at != std::string::npos;
       at = text.find(word, at + by.size()))
    text.replace(at, word.size(), by);
  return text;
}

// `text` with each of these words replaced everywhere, in their order.
using Words = std::initializer_list<std::pair<const char*, std::string>>;
inline std::string replaced(std::string text, Words words) {
  for (const auto& [word, by] : words) text = replaced(std::move(text), word, by);
  return text;
}

// Sets `sum` to its sum over all lanes, or to the largest, in two stages: 16 lanes join every 16th
// each, then every lane joins these 16. A tree would have eight barriers.
inline std::string over_lanes(bool is_largest = false) {
  std::string text = R"(
  sums[lane()] = sum;
  synchronise();
  sum = START;
  if (lane() < 16) {
    for (int other = lane(); other < args.lanes; other += 16) sum = JOIN sums[other] END;
    sixteenths[lane()] = sum;
  }
  synchronise();
  sum = START;
  for (int one = 0; one < 16; ++one) sum = JOIN sixteenths[one] END;
)";
  text = replaced(text, "START", is_largest ? "-INFINITY" : "0.0f");
  text = replaced(text, "JOIN", is_largest ? "fmax(sum," : "sum +");
  return replaced(text, "END", is_largest ? ")" : "");
}

// RMS norm of row `row` of x, in a kernel with the arrays `sums` [lanes or more] and `sixteenths`
// [16] of the work-group (rms_norm.cc). norm_of_row() sets `inverse`; where the sum is written,
// `keeps` is the condition for it. normalised() is an element of the row, or four with ReadFloats.
std::string norm_of_row(const NormShape& shape, const std::string& row_of_skip,
                        const std::string& keeps);
std::string normalised(const NormShape& shape, const std::string& row_of_skip,
                       const std::string& word, const std::string& k);
// The tensors of a norm behind x and its weight: those of the skip, and the sum.
void add_skip(const NormShape& shape, KernelDescription& kernel);

// The form of flow_attention that appends (append_heads.cc): the text that rotates queries and the
// token's own key and appends this and its value, and that with which the softmax begins with them.
// `rows`: queries of a work-group. kSixteenths: how many lanes join a row's sum.
inline constexpr std::int64_t kSixteenths = 16;
std::string append_of_token(const AttentionShape& shape);
const char* newest_score();
const char* newest_value();
void set_tensors_of_append(const AttentionShape& shape, std::int64_t rows,
                           KernelDescription& kernel);

// Lanes of a work-group that has a row of so many columns. With 256, the most that every GPU takes,
// each has few columns of a long row.
inline std::int64_t lanes_of_row(std::int64_t columns) { return columns < 256 ? 64 : 256; }

// The order in which neighbouring lanes read a factor: along the columns of the right one, or along
// the depth, whichever is the memory's.
enum class ReadAlong : std::uint8_t { kDepth, kColumns };

// Pieces of the kernel's text. `row`, `k` and `column` are the place in left [rows, depth] or right
// [depth, columns].
struct TiledProduct {
  // Expressions of sizes.
  std::string rows;
  std::string depth;
  std::string columns;
  // Declarations before the loop. With kColumns a lane reads one column of the right factor, `own`.
  std::string setup = {};
  // Statements that assign to `element`, which is 0.
  std::string left;
  std::string right;
  ReadAlong right_along = ReadAlong::kColumns;
  // The statement that writes `sum`, the element of the product.
  std::string write;
};

// Sets body, constants and lanes of the kernel. The third axis of its grid is the caller's.
void fill_tiled_product(const TiledProduct& product, KernelDescription& kernel);
Grid tiled_product_grid(std::int64_t rows, std::int64_t columns, std::int64_t third = 1);

// Parts of flow_attention (attention_forms.cc). attention_text() replaces the words for where a
// sequence and its keys are: LENGTHS (declarations of batch, past, valid, base, first_row), RANGE
// (of `from` and `to`, the keys that `token` sees), PLACE_OF_ROW (coordinates of an `element` of a
// `token`'s `head`) and PLACE_OF_KEY (of a `key`). The others set the mask and its arguments, and
// the arguments with is_whole.
std::string attention_text(const AttentionShape& shape, std::string text);
void set_mask(const AttentionShape& shape, KernelDescription& kernel);
void set_tensors_of_whole(const AttentionShape& shape, KernelDescription& kernel);
// The row of the cache that holds a position (an expression), and the arguments for it with
// is_paged.
std::string row_of_cache(bool is_paged, const std::string& position);
void add_pages(KernelDescription& kernel);
// States of the parts' softmax [parts, heads, 2], and sinks [heads].
TensorDescription states_of(const AttentionShape& shape, Access access);
TensorDescription sinks_of(const AttentionShape& shape);

}  // namespace flownpu::gpu
