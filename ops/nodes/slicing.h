// SPDX-License-Identifier: Apache-2.0
// Slicing: a long prompt is computed a few hundred tokens at a time, so that intermediate values
// stay in the processor's caches and take little memory. A slice is a range of axis 1 of a value
// [batch, tokens, ..]. A step lists its inputs and outputs that may be slices;
// ep/partition/schedule.h finds the steps that may run slice by slice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "ops/nodes/node.h"
#include "ops/nodes/tensor.h"

namespace flownpu {

// The inputs and outputs that are slices if a step runs once for each slice of tokens, in order.
// Each run gets all other inputs whole. It also gets all other outputs whole, in the same memory,
// and writes the slice's part of them; the last slice completes them. Its results must not depend
// on where the slices are cut.
struct Slicing {
  // Positions in Node::inputs and Node::outputs; positions of absent values are ignored.
  std::vector<std::size_t> inputs;
  std::vector<std::size_t> outputs;
  // Whether the step knows that axis 1 holds tokens, as attention does: a step that treats all rows
  // alike does not know.
  bool holds_tokens = false;
  // Positions of inputs int32 [batch, tokens], which the step gets whole. They say where slices may
  // be cut: not between two tokens of a row with the same number above 0.
  std::vector<std::size_t> blocks = {};
};

// The slicing of a step in which each row of `inputs` (and of no other input) makes one row of
// every output; a row is the last `row_axes` axes. nullopt if axis 1 is one of these axes, or an
// input's rank is unknown.
std::optional<Slicing> slice_rows(const Node& node, std::vector<std::size_t> inputs, int row_axes);

// The slicing of an element-wise step with NumPy's broadcasting. nullopt if an input would have to
// be sliced along another axis than its axis 1, or is a constant that would have to be sliced.
std::optional<Slicing> slice_elements(const Node& node);

// The number of tokens in the next slice, of the remaining `left`, if `at_once` is the best number
// (0: all). A remainder of less than a quarter of `at_once` joins the slice before, because a small
// slice would still read all weights.
std::int64_t next_slice(std::int64_t left, std::int64_t at_once);

// The first token from `end` on that may begin a slice according to `blocks` (int32 [batch,
// tokens], see Slicing::blocks). Returns `end` if `blocks` has another type or rank, which the step
// that reads it reports.
std::int64_t after_blocks(const Tensor& blocks, std::int64_t end);

}  // namespace flownpu
