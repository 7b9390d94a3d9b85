// SPDX-License-Identifier: Apache-2.0
// Slicing: how a long prompt is computed some hundred tokens at a time, so that what lies between
// two steps stays in the caches and takes little memory. Axis 1 of a value [batch, tokens, ..] is
// what is sliced. A step says which of its inputs and outputs it takes and makes in slices; the
// program above finds the steps that may be run slice after slice (ep/program/schedule.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "ops/nodes/node.h"
#include "ops/nodes/tensor.h"

namespace flownpu {

// What a step takes and makes in slices, if it may be run once for each slice of tokens, in their
// order. Inputs that are not listed it gets whole each time. Outputs that are not listed it gets
// whole as well, in the same memory each time, and writes what the slice adds to them: the last
// slice completes them. What it computes of a slice does not depend on where the slices are cut.
struct Slicing {
  // Positions in the node's lists; those of absent values do not count.
  std::vector<std::size_t> inputs;
  std::vector<std::size_t> outputs;
  // Whether axis 1 is known to hold tokens: to a step that treats all rows alike it may be
  // anything.
  bool holds_tokens = false;
  // Positions of inputs int32 [batch, tokens], which it gets whole, and which tell where slices may
  // be cut: not between two tokens of a row that have the same number above 0.
  std::vector<std::size_t> blocks = {};
};

// A row of `inputs` (and of nothing else) makes a row of every output; a row is the last `row_axes`
// axes. Nothing if axis 1 is one of those, or if it cannot be told.
std::optional<Slicing> slice_rows(const Node& node, std::vector<std::size_t> inputs, int row_axes);

// Element by element, with numpy's broadcasting. Nothing if an input would have to be sliced along
// another axis than its axis 1, or is a constant that would have to be sliced.
std::optional<Slicing> slice_elements(const Node& node);

// How many of the `left` tokens the next slice takes, where `at_once` are best computed at once (0:
// all there are). A rest of less than a quarter of that goes with the slice before it: a slice of a
// few tokens would read all weights for them.
std::int64_t next_slice(std::int64_t left, std::int64_t at_once);

// The first token from `end` on that may begin a slice, as `blocks` (int32 [batch, tokens]) has it.
// `end`, if that is no such tensor: the step that takes it says so.
std::int64_t after_blocks(const Tensor& blocks, std::int64_t end);

}  // namespace flownpu
