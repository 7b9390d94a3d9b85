// SPDX-License-Identifier: Apache-2.0
// Operators whose output is the input's elements, in their order, under another shape.
#include <memory>

#include "ops/cpu/elements.h"
#include "ops/cpu/integers.h"
#include "ops/cpu/moves/copy_lines.h"
#include "ops/cpu/step.h"

namespace flownpu::cpu {
namespace {

class Reshaping : public Step {
 public:
  explicit Reshaping(const Context& context) : pool_(context.pool) {}

  std::optional<std::size_t> repeated_input() const override { return 0; }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    if (inputs[0].data == outputs[0].data) return;
    const std::size_t bytes = inputs[0].bytes();
    copy_lines(*pool_, 1, bytes, inputs[0].as<const std::byte>(), bytes, outputs[0].as<std::byte>(),
               bytes);
  }

 private:
  std::shared_ptr<ThreadPool> pool_;
};

class Identity final : public Reshaping {
 public:
  Identity(const Node& /*node*/, const Context& context) : Reshaping(context) {}

  std::optional<Slicing> slicing(const Node& node) const override { return slice_elements(node); }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    outputs[0] = inputs[0].shape;
  }
};

class Reshape final : public Reshaping {
 public:
  Reshape(const Node& node, const Context& context)
      : Reshaping(context),
        name_(to_string(node)),
        allow_zero_(node.integer("allowzero", 0) != 0) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& from = inputs[0].shape;
    Shape to;
    int unknown = -1;
    std::int64_t product = 1;
    for (std::int64_t i = 0; i < inputs[1].shape.elements(); ++i) {
      std::int64_t dim = integer_at(inputs[1], i);
      if (dim == 0 && !allow_zero_) dim = i < from.rank() ? from[static_cast<int>(i)] : 0;
      if (dim < -1 || (dim == -1 && unknown >= 0))
        fail("[", name_, "] expected sizes of 0 or more, and one -1 at most, got ", dim);
      if (dim == -1) {
        unknown = static_cast<int>(i);
      } else if (__builtin_mul_overflow(product, dim, &product)) {
        fail("[", name_, "] expected a shape of ", from.elements(), " elements, got more");
      }
      to.append(dim);
    }
    if (unknown >= 0) to[unknown] = product == 0 ? 0 : from.elements() / product;
    if (to.elements() != from.elements()) {
      fail("[", name_, "] expected a shape of ", from.elements(), " elements, got ", to_string(to));
    }
    outputs[0] = to;
  }

 private:
  std::string name_;
  bool allow_zero_;
};

// Unsqueeze and Squeeze put in and take out axes of size 1. Without axes, Squeeze takes out all of
// them. Before version 13 axes were an attribute.
class Unsqueeze final : public Reshaping {
 public:
  Unsqueeze(const Node& node, const Context& context)
      : Reshaping(context), name_(to_string(node)), axes_(node.integers("axes")) {
    if (node.input(1) == nullptr && !node.attributes.contains("axes"))
      fail("[", name_, "] expected axes, got none");
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const bool given = is_given(inputs, 1);
    const std::int64_t count =
        given ? inputs[1].shape.elements() : static_cast<std::int64_t>(axes_.size());
    const std::int64_t rank = inputs[0].shape.rank() + count;
    if (rank > Shape::kMaxRank)
      unsupported("[", name_, "] expected rank ", Shape::kMaxRank, " at most, got ", rank);
    const AxisSet added = given ? axes_in(name_, inputs[1], rank) : axes_in(name_, axes_, rank);
    Shape to;
    int next = 0;
    for (int axis = 0; axis < rank; ++axis)
      to.append(added.has(axis) ? 1 : inputs[0].shape[next++]);
    outputs[0] = to;
  }

 private:
  std::string name_;
  std::vector<std::int64_t> axes_;
};

class Squeeze final : public Reshaping {
 public:
  Squeeze(const Node& node, const Context& context)
      : Reshaping(context), name_(to_string(node)), axes_(node.integers("axes")) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& from = inputs[0].shape;
    const bool as_input = is_given(inputs, 1);
    const bool given = as_input || !axes_.empty();
    const AxisSet removed =
        as_input ? axes_in(name_, inputs[1], from.rank()) : axes_in(name_, axes_, from.rank());
    Shape to;
    for (int axis = 0; axis < from.rank(); ++axis) {
      if (given && removed.has(axis) && from[axis] != 1)
        fail("[", name_, "] expected axis ", axis, " to be of size 1, got ", to_string(from));
      if (given ? !removed.has(axis) : from[axis] != 1) to.append(from[axis]);
    }
    outputs[0] = to;
  }

 private:
  std::string name_;
  std::vector<std::int64_t> axes_;
};

// Makes two axes: of those before `axis`, and of those from it on.
class Flatten final : public Reshaping {
 public:
  Flatten(const Node& node, const Context& context)
      : Reshaping(context), name_(to_string(node)), axis_(node.integer("axis", 1)) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& from = inputs[0].shape;
    // `axis` may be one past the last axis.
    const int axis =
        axis_ == from.rank() ? from.rank() : static_cast<int>(wrap(name_, axis_, from.rank()));
    const Shape before(from.begin(), static_cast<std::size_t>(axis));
    const Shape after(from.begin() + axis, static_cast<std::size_t>(from.rank() - axis));
    outputs[0] = Shape{before.elements(), after.elements()};
  }

 private:
  std::string name_;
  std::int64_t axis_;
};

constexpr Port kInput[] = {{.name = "input", .type_letter = 'T'}};
constexpr Port kOutput[] = {{.name = "output", .type_letter = 'T'}};
constexpr Port kReshape[] = {{.name = "data", .type_letter = 'T'},
                             {.name = "shape", .types = kInt64, .shape = "[R]"}};
constexpr AttributeRule kAllowZero[] = {flag("allowzero")};
constexpr Port kWithAxes[] = {{.name = "data", .type_letter = 'T'},
                              optional({.name = "axes", .types = kInt64})};
constexpr AttributeRule kAxes[] = {integers("axes", -Shape::kMaxRank, Shape::kMaxRank - 1)};
constexpr AttributeRule kAxis[] = {axis("axis")};

constexpr Operator kOperators[] = {
    {{"", "Identity", 1, 25, kInput, kOutput}, make<Identity>},
    {{"", "Reshape", 5, 25, kReshape, kOutput, kAllowZero}, make<Reshape>},
    {{"", "Unsqueeze", 1, 25, kWithAxes, kOutput, kAxes}, make<Unsqueeze>},
    {{"", "Squeeze", 1, 25, kWithAxes, kOutput, kAxes}, make<Squeeze>},
    {{"", "Flatten", 1, 25, kInput, kOutput, kAxis}, make<Flatten>},
};

}  // namespace

std::span<const Operator> reshape_operators() { return kOperators; }

}  // namespace flownpu::cpu
