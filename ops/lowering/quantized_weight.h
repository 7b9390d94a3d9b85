// SPDX-License-Identifier: Apache-2.0
// The 4-bit weights of `com.microsoft` operators, and Q4NX made of them.
//
// MatMulNBits and GatherBlockQuantized hold W[M,K] as codes of 4 bits (low nibble first along K), a
// scale for each `block_size` columns of a row, and a zero point, 8 where it is not given:
//
//   W[m, k] = scale[m, k / block_size] * (code[m, k] - zero_point[m, k / block_size])
//
// Q4NX says the same with a minimum. Codes stay as they are; the scale is rounded to bf16, and the
// minimum is -zero_point times that, rounded as well. Only where a block is 16 columns, two of
// which share Q4NX's scale, are the weights quantised again. Blocks of Q4NX are narrow, and
// symmetric ones where codes stay and no zero point is other than 8.
// graph_rewrites/quantized_weight.py makes the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "ops/lowering/graph.h"
#include "ops/lowering/quantize_group.h"
#include "ops/node.h"
#include "ops/q4nx.h"

namespace flownpu::lowering {

// Of weights and of what they were replaced by.
struct Difference {
  double squares = 0;
  double squared_error = 0;
};

struct QuantizedWeight {
  Value codes;        // uint8, rows x blocks x block_size / 2
  Value scales;       // float32, rows x blocks
  Value zero_points;  // absent (no name), uint8 packed as codes to whole bytes a row, or as scales
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t block_size = 32;

  // Why it cannot become Q4NX; empty if it can.
  std::string obstacle() const;
  bool keeps_codes() const;
  // The smallest that holds it.
  q4nx::Layout layout() const;
  // Writes q4nx::blocks_shape(rows, columns, layout) bytes. Returns |W - W'| / |W| in the Frobenius
  // norm, for the W' that it wrote, where weights are quantised again, and else 0.
  double pack(std::byte* blocks, const q4nx::Layout& layout) const;

 private:
  std::int64_t blocks() const;
  float zero_point(std::int64_t row, std::int64_t block) const;
  Q4NXGroup group(std::int64_t row, std::int64_t first) const;
  Q4NXGroup new_group(std::int64_t row, std::int64_t first, Difference& difference) const;
  float weight(std::int64_t row, std::int64_t column) const;
  void pack_row(std::int64_t row, std::byte* row_of_blocks, const q4nx::Layout& layout,
                Difference& difference) const;
};

// Q4NX constants of a graph that is being lowered: first by name, then, all at once and by all
// cores, their bytes.
class RepackedWeights {
 public:
  // The constant of a weight; of one that was added before (a table that is embedding and LM head),
  // the same.
  Value add(const QuantizedWeight& weight);
  // The constant of the weights of several Q4NXMatMul, one below the other; each fills its last row
  // of blocks. None if they are no constants, of different K, or Q4NX in the model already and of
  // layouts that differ.
  std::optional<Value> join(const std::vector<const Node*>& products);
  // Gives the nodes' constants their bytes. Constants that no node reads are not made.
  void make(std::vector<Node>& nodes);

  std::size_t made() const { return made_; }
  // Of these, those whose codes could not be kept, and the largest relative error among them.
  std::size_t quantized_again() const { return quantized_again_; }
  double largest_error() const { return largest_error_; }

 private:
  // What is written at its place: a weight, or a constant of the model that is Q4NX already.
  struct Part {
    std::variant<QuantizedWeight, Value> source;
    std::int64_t rows = 0;
    std::int64_t columns = 0;

    bool is_native() const { return std::holds_alternative<Value>(source); }
    std::size_t bytes(const q4nx::Layout& layout) const;
    // As QuantizedWeight::pack; a native one is of this layout.
    double pack(std::byte* blocks, const q4nx::Layout& layout) const;
  };
  struct Constant {
    std::vector<Part> parts;
    q4nx::Layout layout;
  };

  // The constant behind an input of Q4NXMatMul; none if it has no parts or layout.
  std::optional<Constant> constant_of(const Node& product) const;

  std::map<std::string, Constant, std::less<>> constants_;
  std::size_t made_ = 0;
  std::size_t quantized_again_ = 0;
  double largest_error_ = 0;
};

}  // namespace flownpu::lowering
