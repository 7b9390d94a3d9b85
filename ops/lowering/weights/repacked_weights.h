// SPDX-License-Identifier: Apache-2.0
// The Q4NX constants of a graph that is being rewritten. At first they have only names and shapes.
// Their bytes are made later, one constant at a time or all at once.
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

// A float32 weight W[M,K] that is quantised when its blocks are made.
struct FloatWeight {
  // Returns the weight's elements, row by row, or as [K][M] if it is transposed; they are released
  // when the blocks have been made.
  std::function<std::shared_ptr<const float>()> read;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  bool transposed = false;
};

// The blocks of a weight, or of several weights stacked by rows, each of which is padded to whole
// blocks.
class Q4NXConstant {
 public:
  struct StackedWeight {
    // The source of the blocks: a quantised weight in another format, floats, or a constant that
    // is Q4NX already.
    std::variant<QuantizedWeight, FloatWeight, Value> source;
    std::int64_t rows = 0;
    std::int64_t columns = 0;
    // The layout that the constant has, or that suits the weight best.
    q4nx::Layout layout;

    bool keeps_codes() const;
  };

  // All parts must have the same number of columns, and codes of one kind. They get their
  // common layout or, if layouts differ, narrow blocks with minima.
  explicit Q4NXConstant(std::vector<StackedWeight> parts);

  Shape shape() const;
  bool keeps_codes() const;
  const std::vector<StackedWeight>& parts() const { return parts_; }

  // A piece of the work of making the bytes, which is divided among threads.
  struct Piece {
    std::size_t bytes = 0;
    std::function<Difference()> pack;
  };
  // Pieces that together write all blocks to `memory`; they throw Error if a weight is not finite.
  // `measured`: whether pieces measure the difference also where codes are kept.
  std::vector<Piece> pieces(std::byte* memory, bool measured) const;

 private:
  std::vector<StackedWeight> parts_;
  q4nx::Layout layout_;
};

// Runs the pieces on all cores, the largest first, so that the cores finish together. Returns each
// piece's difference.
std::vector<Difference> run(const std::vector<Q4NXConstant::Piece>& pieces);

class RepackedWeights {
 public:
  explicit RepackedWeights(Graph& graph) : graph_(graph) {}

  // Returns the constant of a weight. A weight that was added before, such as a table that is both
  // embedding and LM head, keeps its constant.
  Value add(const QuantizedWeight& weight);
  // Returns a constant of several weights stacked by rows. `name`: its name without the suffix.
  Value stack(const std::vector<QuantizedWeight>& weights, const std::string& name);
  // Why the weights of several Q4NXMatMul nodes cannot be joined; empty if they can.
  std::string join_obstacle(const std::vector<const Node*>& products) const;
  // Returns a constant of the products' weights stacked by rows. `name`: the last part of its name;
  // the first part is common to the weights' names.
  Value join(const std::vector<const Node*>& products, const std::string& name);

  // Adds a constant whose bytes are made later. Inputs of Q4NXMatMul nodes with this name refer to
  // it from now on.
  void take(const std::string& name, Q4NXConstant constant);
  // The constant that an input refers to; null if it was not added here.
  const Q4NXConstant* find(const Value& value) const;

  // Makes the bytes of all constants that the nodes read, and points the nodes' inputs to them.
  void make(std::vector<Node>& nodes);
  // Statistics of make(): the number of weights that it made, the number that it quantised again
  // because their codes could not be kept, and the largest relative error among these.
  std::size_t made() const { return made_; }
  std::size_t quantized_again() const { return quantized_again_; }
  double largest_error() const { return largest_error_; }

 private:
  // The parts of a Q4NXMatMul's weight; empty if it is no constant of M x K weights.
  std::vector<Q4NXConstant::StackedWeight> parts_of(const Node& product) const;
  Value promise(const std::string& name, Q4NXConstant constant);
  void count(const Q4NXConstant& constant, const Difference& difference);

  Graph& graph_;
  std::map<std::string, Q4NXConstant, std::less<>> constants_;
  std::size_t made_ = 0;
  std::size_t quantized_again_ = 0;
  double largest_error_ = 0;
};

}  // namespace flownpu::lowering
