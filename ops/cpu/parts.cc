// SPDX-License-Identifier: Apache-2.0
// Operators that copy parts of a tensor: what exports cut packed projections and last tokens with.
#include <algorithm>
#include <array>
#include <cstring>

#include "ops/cpu/cpu_step.h"
#include "ops/cpu/integers.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

// Parts of the last axis, by their constant sizes.
class Split final : public Step {
 public:
  Split(const Node& node, const Context& /*context*/)
      : name_(to_string(node)), axis_(node.integer("axis", 0)) {
    check_integers(node, 1);
    size_ = size_of(node.inputs[0].type);
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& whole = inputs[0].shape;
    if (wrap(name_, axis_, whole.rank()) != whole.rank() - 1)
      fail("[", name_, "] expected the last axis, got axis ", axis_);
    std::int64_t sum = 0;
    for (std::int64_t i = 0; i < inputs[1].shape.elements(); ++i) sum += integer_at(inputs[1], i);
    if (inputs[1].shape.elements() != static_cast<std::int64_t>(outputs.size()) || sum != whole[-1])
      fail("[", name_, "] expected ", outputs.size(), " sizes that add up to ", whole[-1], ", got ",
           inputs[1].shape.elements(), " that add up to ", sum);
    for (std::size_t part = 0; part < outputs.size(); ++part) {
      outputs[part] = whole;
      outputs[part][-1] = integer_at(inputs[1], static_cast<std::int64_t>(part));
    }
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const std::size_t line = static_cast<std::size_t>(inputs[0].shape[-1]) * size_;
    const std::byte* begin = inputs[0].as<const std::byte>();
    const std::byte* end = begin + inputs[0].bytes();
    for (const Tensor& output : outputs) {
      const std::size_t part = static_cast<std::size_t>(output.shape[-1]) * size_;
      std::byte* target = output.as<std::byte>();
      for (const std::byte* row = begin; part > 0 && row < end; row += line, target += part) {
        if (output.data != nullptr) std::memcpy(target, row, part);
      }
      begin += part;
      end += part;
    }
  }

  std::optional<Slicing> slicing(const Node& node) const override {
    return slice_rows(node, {0}, 1);
  }

 private:
  std::string name_;
  std::int64_t axis_;
  std::size_t size_ = 0;
};

// Neighbours along each axis: steps of 1 only.
class Slice final : public Step {
 public:
  Slice(const Node& node, const Context& /*context*/) : name_(to_string(node)) {
    for (std::size_t input = 1; input < 5; ++input) {
      if (input < 3 || node.input(input) != nullptr) check_integers(node, input);
    }
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    outputs[0] = inputs[0].shape;
    const Ranges ranges = this->ranges(inputs);
    for (int axis = 0; axis < inputs[0].shape.rank(); ++axis)
      outputs[0][axis] = ranges[static_cast<std::size_t>(axis)].count;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    if (outputs[0].shape.elements() == 0) return;
    std::byte* target = outputs[0].as<std::byte>();
    copy(inputs[0], ranges(inputs), 0, inputs[0].as<const std::byte>(), inputs[0].bytes(), target);
  }

 private:
  struct Range {
    std::int64_t first = 0;
    std::int64_t count = 0;
  };
  using Ranges = std::array<Range, Shape::kMaxRank>;

  Ranges ranges(std::span<const Tensor> inputs) const {
    const Shape& shape = inputs[0].shape;
    Ranges ranges{};
    for (int axis = 0; axis < shape.rank(); ++axis)
      ranges[static_cast<std::size_t>(axis)] = {0, shape[axis]};
    const auto given = [&](std::size_t input) {
      return inputs.size() > input && inputs[input].present();
    };
    for (std::int64_t i = 0; i < inputs[1].shape.elements(); ++i) {
      const std::int64_t axis = wrap(name_, given(3) ? integer_at(inputs[3], i) : i, shape.rank());
      if (given(4) && integer_at(inputs[4], i) != 1)
        fail("[", name_, "] expected steps of 1, got ", integer_at(inputs[4], i));
      const std::int64_t size = shape[static_cast<int>(axis)];
      const auto place = [&](std::int64_t index) {
        return std::clamp<std::int64_t>(index < 0 ? index + size : index, 0, size);
      };
      const std::int64_t first = place(integer_at(inputs[1], i));
      const std::int64_t end = place(integer_at(inputs[2], i));
      ranges[static_cast<std::size_t>(axis)] = {first, std::max<std::int64_t>(end - first, 0)};
    }
    return ranges;
  }

  // The part of `bytes` bytes that axes `axis` and on span; an axis that is taken whole, with all
  // after it, is one copy.
  void copy(const Tensor& data, const Ranges& ranges, int axis, const std::byte* source,
            std::size_t bytes, std::byte*& target) const {
    const bool whole = std::all_of(
        ranges.begin() + axis, ranges.begin() + data.shape.rank(),
        [&, at = axis](const Range& range) mutable { return range.count == data.shape[at++]; });
    if (whole) {
      std::memcpy(target, source, bytes);
      target += bytes;
      return;
    }
    const Range& range = ranges[static_cast<std::size_t>(axis)];
    const std::size_t line = bytes / static_cast<std::size_t>(data.shape[axis]);
    for (std::int64_t i = range.first; i < range.first + range.count; ++i)
      copy(data, ranges, axis + 1, source + static_cast<std::size_t>(i) * line, line, target);
  }

  std::string name_;
};

template <typename Made>
std::unique_ptr<Step> make(const Node& node, const Context& context) {
  return std::make_unique<Made>(node, context);
}

constexpr Operator kOperators[] = {
    {"", "Split", make<Split>},
    {"", "Slice", make<Slice>},
};

}  // namespace

std::span<const Operator> part_operators() { return kOperators; }

}  // namespace flownpu::cpu
