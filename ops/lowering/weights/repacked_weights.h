// SPDX-License-Identifier: Apache-2.0
// The Q4NX constants of a graph that is being rewritten: first by name, then their bytes, of one
// when it is asked for, or of all at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "ops/formats/q4nx.h"
#include "ops/lowering/graph.h"
#include "ops/lowering/weights/quantized_weight.h"
#include "ops/nodes/node.h"

namespace flownpu::lowering {

// A float32 W[M,K] that is quantised when its blocks are made.
struct FloatWeight {
  // Its numbers, row by row, [K][M] if it is transposed; let go of when the blocks have been made.
  std::function<std::shared_ptr<const float>()> read;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  bool transposed = false;
};

// A weight, or several below one another, each of which fills its last row of blocks.
class Q4NXConstant {
 public:
  struct Part {
    // What its blocks are made of: a weight in other blocks, one of floats, or a constant that is
    // Q4NX already.
    std::variant<QuantizedWeight, FloatWeight, Value> source;
    std::int64_t rows = 0;
    std::int64_t columns = 0;
    // That it has, or is best given.
    q4nx::Layout layout;

    bool keeps_codes() const;
  };

  // The parts have the same columns. All get one layout: theirs, or, where they differ, narrow
  // blocks.
  explicit Q4NXConstant(std::vector<Part> parts);

  Shape shape() const;
  bool keeps_codes() const;
  const std::vector<Part>& parts() const { return parts_; }

  // A piece of the work of making its bytes, which threads share.
  struct Piece {
    std::size_t bytes = 0;
    std::function<Difference()> pack;
  };
  // Pieces that together write all blocks to `memory`; they throw Error where a weight is not
  // finite. `measured`: whether to tell the difference of codes that stay as well.
  std::vector<Piece> pieces(std::byte* memory, bool measured) const;

 private:
  std::vector<Part> parts_;
  q4nx::Layout layout_;
};

// Does the work on all cores, the largest pieces first, so that they end together; what each piece
// tells.
std::vector<Difference> run(const std::vector<Q4NXConstant::Piece>& pieces);

class RepackedWeights {
 public:
  explicit RepackedWeights(Graph& graph) : graph_(graph) {}

  // The constant of a weight; of one that was added before (a table that is embedding and LM head),
  // the same.
  Value add(const QuantizedWeight& weight);
  // The constant of several below one another.
  Value stack(const std::vector<QuantizedWeight>& weights, const std::string& name);
  // Why the weights of several Q4NXMatMul cannot be one; empty if they can.
  std::string join_obstacle(const std::vector<const Node*>& products) const;
  // The constant of them below one another. `name`: the last part of its name, behind what theirs
  // have in common.
  Value join(const std::vector<const Node*>& products, const std::string& name);

  // Takes up a constant that is to be made: the weights of this name, from now on.
  void take(const std::string& name, Q4NXConstant constant);
  // What add(), join() and take() promised; null if it was none of them.
  const Q4NXConstant* find(const Value& value) const;

  // Gives the nodes' constants their bytes. Constants that no node reads are not made.
  void make(std::vector<Node>& nodes);
  // What make() has made: how many weights, how many of them quantised again because their codes
  // could not be kept, and the largest relative error among these.
  std::size_t made() const { return made_; }
  std::size_t quantized_again() const { return quantized_again_; }
  double largest_error() const { return largest_error_; }

 private:
  // The parts of a Q4NXMatMul's weight; none if it is no constant of M x K weights.
  std::vector<Q4NXConstant::Part> parts_of(const Node& product) const;
  Value promise(const std::string& name, Q4NXConstant constant);
  void count(const Q4NXConstant& constant, const Difference& difference);

  Graph& graph_;
  std::map<std::string, Q4NXConstant, std::less<>> constants_;
  std::size_t made_ = 0;
  std::size_t quantized_again_ = 0;
  double largest_error_ = 0;
};

}  // namespace flownpu::lowering
