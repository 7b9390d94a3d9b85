// SPDX-License-Identifier: Apache-2.0
// Transpose of any rank. If the last axis stays last ([batch, tokens, heads, head size] and back),
// rows are copied; otherwise planes are transposed.
#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "ops/cpu/broadcast.h"
#include "ops/cpu/elements.h"
#include "ops/cpu/integers.h"
#include "ops/cpu/plane.h"
#include "ops/cpu/step.h"

namespace flownpu::cpu {
namespace {

// The output's axes in its order, without those of size 1; axes that are neighbours in the input as
// well are joined.
class Axes {
 public:
  Axes(const Shape& input, const std::array<int, Shape::kMaxRank>& order) {
    std::array<std::int64_t, Shape::kMaxRank> strides{};
    std::int64_t stride = 1;
    for (int axis = input.rank() - 1; axis >= 0; --axis) {
      strides[static_cast<std::size_t>(axis)] = stride;
      stride *= input[axis];
    }
    for (int i = 0; i < input.rank(); ++i) {
      const int axis = order[static_cast<std::size_t>(i)];
      add(input[axis], strides[static_cast<std::size_t>(axis)]);
    }
    if (count_ == 0) add_always(1, 1);
    // Strides of the output, whose last axis is innermost.
    std::int64_t written = 1;
    for (int i = count_ - 1; i >= 0; --i) {
      axis_[i].to = written;
      written *= axis_[i].size;
    }
  }

  struct Axis {
    std::int64_t size = 1;
    // Elements from one index to the next, in the input and in the output.
    std::int64_t from = 1;
    std::int64_t to = 1;
  };

  int count() const { return count_; }
  const Axis& operator[](int axis) const { return axis_[axis]; }
  const Axis& last() const { return axis_[count_ - 1]; }

  // The axis along which a plane has its rows; its columns are the output's last axis. It is the
  // input's last axis. If that is also the output's last axis, it is the axis before; -1 if there
  // is none.
  int rows() const {
    if (last().from == 1) return count_ - 2;
    int axis = 0;
    while (axis_[axis].from != 1) ++axis;
    return axis;
  }

 private:
  void add(std::int64_t size, std::int64_t from) {
    if (size == 1) return;
    if (count_ > 0 && axis_[count_ - 1].from == size * from) {
      axis_[count_ - 1].size *= size;
      axis_[count_ - 1].from = from;
      return;
    }
    add_always(size, from);
  }
  void add_always(std::int64_t size, std::int64_t from) {
    axis_[count_++] = {.size = size, .from = from};
  }

  std::array<Axis, Shape::kMaxRank> axis_{};
  int count_ = 0;
};

class Transpose final : public Step {
 public:
  Transpose(const Node& node, const Context& context)
      : context_(context), name_(to_string(node)), permutation_(node.integers("perm")) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& from = inputs[0].shape;
    const auto order = this->order(from);
    Shape to;
    for (int i = 0; i < from.rank(); ++i) to.append(from[order[static_cast<std::size_t>(i)]]);
    outputs[0] = to;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    if (inputs[0].shape.elements() == 0) return;
    const Axes axes(inputs[0].shape, order(inputs[0].shape));
    const Axes::Axis& columns = axes.last();
    with_bytes(inputs[0].type, [&]<typename T> {
      const auto* from = inputs[0].as<const T>();
      auto* to = outputs[0].as<T>();
      for_planes(axes, [&](const Axes::Axis& rows, std::int64_t source, std::int64_t target) {
        if (columns.from == 1) {
          for (std::int64_t row = 0; row < rows.size; ++row)
            std::copy_n(from + source + row * rows.from, columns.size, to + target + row * rows.to);
        } else {
          transpose(from + source, columns.from, to + target, rows.to, rows.size, columns.size);
        }
      });
    });
  }

 private:
  // For each axis of the output its axis in the input; without `perm` the order is reversed.
  std::array<int, Shape::kMaxRank> order(const Shape& shape) const {
    std::array<int, Shape::kMaxRank> order{};
    std::array<bool, Shape::kMaxRank> seen{};
    const auto rank = static_cast<std::size_t>(shape.rank());
    if (!permutation_.empty() && permutation_.size() != rank)
      fail("[", name_, "] expected an input of rank ", permutation_.size(), ", got ",
           to_string(shape));
    for (std::size_t i = 0; i < rank; ++i) {
      const std::int64_t axis = permutation_.empty() ? static_cast<std::int64_t>(rank - 1 - i)
                                                     : wrap(name_, permutation_[i], shape.rank());
      order[i] = static_cast<int>(axis);
      if (std::exchange(seen[static_cast<std::size_t>(axis)], true))
        fail("[", name_, "] expected perm to have each axis once, got axis ", axis, " twice");
    }
    return order;
  }

  // Calls work(rows, first element of the input, of the output) for parts of all planes, on all
  // threads; `rows` has as many rows as the part.
  template <typename Work>
  void for_planes(const Axes& axes, const Work& work) const {
    const int row_axis = axes.rows();
    const Axes::Axis rows = row_axis < 0 ? Axes::Axis() : axes[row_axis];
    const std::int64_t columns = axes.last().size;
    // A task has whole tiles of a plane, or many planes.
    const std::int64_t part_rows =
        std::min(rows.size, (kElementsEach / columns + kTile) / kTile * kTile);
    const std::int64_t parts = (rows.size + part_rows - 1) / part_rows;
    std::int64_t planes = 1;
    for (int axis = 0; axis < axes.count() - 1; ++axis)
      if (axis != row_axis) planes *= axes[axis].size;
    const std::int64_t each = std::max<std::int64_t>(kElementsEach / (part_rows * columns), 1);
    context_.pool->run((planes * parts + each - 1) / each, [&](std::int64_t task) {
      const std::int64_t end = std::min((task + 1) * each, planes * parts);
      for (std::int64_t i = task * each; i < end; ++i) {
        const std::int64_t first = i % parts * part_rows;
        const auto [source, target] = plane(axes, row_axis, i / parts);
        Axes::Axis part = rows;
        part.size = std::min(part_rows, rows.size - first);
        work(part, source + first * rows.from, target + first * rows.to);
      }
    });
  }

  // The offsets at which plane `index` begins in the input and in the output.
  static std::pair<std::int64_t, std::int64_t> plane(const Axes& axes, int row_axis,
                                                     std::int64_t index) {
    std::int64_t source = 0;
    std::int64_t target = 0;
    for (int axis = axes.count() - 2; axis >= 0; --axis) {
      if (axis == row_axis) continue;
      const std::int64_t coordinate = index % axes[axis].size;
      index /= axes[axis].size;
      source += coordinate * axes[axis].from;
      target += coordinate * axes[axis].to;
    }
    return {source, target};
  }

  Context context_;
  std::string name_;
  std::vector<std::int64_t> permutation_;
};

constexpr Port kData[] = {{.name = "data", .type_letter = 'T'}};
constexpr Port kTransposed[] = {{.name = "transposed", .type_letter = 'T'}};
constexpr AttributeRule kPermutation[] = {integers("perm", 0, Shape::kMaxRank - 1)};

constexpr Operator kOperators[] = {
    {{"", "Transpose", 1, 25, kData, kTransposed, kPermutation}, make<Transpose>}};

}  // namespace

std::span<const Operator> transpose_operators() { return kOperators; }

}  // namespace flownpu::cpu
