// SPDX-License-Identifier: Apache-2.0
// Slicing: how a long prompt is computed a few hundred tokens at a time, so that intermediate
// values stay in the processor's caches and take little memory. A slice is a range of axis 1 of a
// value [batch, tokens, ..]. A step says which of its inputs and outputs it takes and makes in
// slices; ep/partition/schedule.h finds the steps that may be run slice after slice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "ops/nodes/node.h"
#include "ops/nodes/tensor.h"

namespace flownpu {

// Which inputs and outputs a step takes and makes in slices, if it may be run once for each slice
// of tokens, in order. It gets inputs that are not listed whole each time. It also gets outputs
// that are not listed whole, in the same memory each time, and writes the part that the slice adds:
// the last slice completes them. Its results must not depend on where the slices are cut.
struct Slicing {
  // Positions in Node::inputs and Node::outputs; positions of absent values are ignored.
  std::vector<std::size_t> inputs;
  std::vector<std::size_t> outputs;
  // Whether the step knows that axis 1 holds tokens, as attention does: a step that treats all rows
  // alike does not know.
  bool holds_tokens = false;
  // Positions of inputs int32 [batch, tokens], which the step gets whole, and which say where
  // slices may be cut: not between two tokens of a row that have the same number above 0.
  std::vector<std::size_t> blocks = {};
};

// The slicing of a step in which each row of `inputs` (and of no other input) makes one row of
// every output; a row is the last `row_axes` axes. nullopt if axis 1 is one of these axes, or an
// input's rank is unknown.
std::optional<Slicing> slice_rows(const Node& node, std::vector<std::size_t> inputs, int row_axes);

// The slicing of an element-wise step with NumPy's broadcasting. nullopt if an input would have to
// be sliced along another axis than its axis 1, or is a constant that would have to be sliced.
std::optional<Slicing> slice_elements(const Node& node);

// How many of the remaining `left` tokens the next slice takes, if `at_once` are best computed at
// once (0: all of them). A remainder of less than a quarter of `at_once` is added to the slice
// before it, since a slice of few tokens would still read all weights.
std::int64_t next_slice(std::int64_t left, std::int64_t at_once);

// The first token from `end` on that may begin a slice according to `blocks` (int32 [batch,
// tokens], see Slicing::blocks). Returns `end` if `blocks` has another type or rank, which the step
// that reads it reports.
std::int64_t after_blocks(const Tensor& blocks, std::int64_t end);

}  // namespace flownpu
