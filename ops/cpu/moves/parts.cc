// SPDX-License-Identifier: Apache-2.0
// Operators that put tensors together from parts, and cut parts out of them.
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "ops/cpu/elements.h"
#include "ops/cpu/integers.h"
#include "ops/cpu/moves/copy_lines.h"
#include "ops/cpu/step.h"

namespace flownpu::cpu {
namespace {

// A tensor seen along one axis: `lines` lines, in which an index of the axis takes `bytes` bytes.
struct Lines {
  std::int64_t lines = 1;
  std::size_t bytes = 1;

  Lines(const Tensor& tensor, std::int64_t axis) : bytes(size_of(tensor.type)) {
    for (int i = 0; i < tensor.shape.rank(); ++i) {
      if (i < axis) lines *= tensor.shape[i];
      if (i > axis) bytes *= static_cast<std::size_t>(tensor.shape[i]);
    }
  }
};

// Whether the axis is the value's last one. Then a row of each input makes a row of the output.
bool is_last_axis(const Value& value, std::int64_t axis) {
  return value.shape && (axis == -1 || axis == value.shape->rank() - 1);
}

class Concat final : public Step {
 public:
  Concat(const Node& node, const Context& context)
      : pool_(context.pool), name_(to_string(node)), axis_(node.required_integer("axis")) {}

  std::optional<Slicing> slicing(const Node& node) const override {
    std::vector<std::size_t> all(node.inputs.size());
    std::iota(all.begin(), all.end(), std::size_t{0});
    const auto along = [this](const Value& value) { return is_last_axis(value, axis_); };
    if (!std::ranges::all_of(node.inputs, along)) return std::nullopt;
    return slice_rows(node, std::move(all), 1);
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    Shape whole = inputs[0].shape;
    const int axis = static_cast<int>(wrap(name_, axis_, whole.rank()));
    std::int64_t size = 0;
    for (const Tensor& input : inputs) {
      Shape other = input.shape;
      if (other.rank() == whole.rank()) other[axis] = whole[axis];
      // ONNX Runtime leaves out empty inputs, whatever their shapes.
      if (!(other == whole))
        unsupported("[", name_, "] expected shapes that differ in axis ", axis, " only, got ",
                    to_string(inputs[0].shape), " and ", to_string(input.shape));
      size += input.shape[axis];
    }
    whole[axis] = size;
    outputs[0] = whole;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const std::int64_t axis = wrap(name_, axis_, outputs[0].shape.rank());
    const Lines whole(outputs[0], axis);
    const auto size = [axis](const Tensor& tensor) {
      return static_cast<std::size_t>(tensor.shape[static_cast<int>(axis)]);
    };
    auto* to = outputs[0].as<std::byte>();
    for (const Tensor& input : inputs) {
      const std::size_t line = size(input) * whole.bytes;
      copy_lines(*pool_, whole.lines, line, input.as<const std::byte>(), line, to,
                 size(outputs[0]) * whole.bytes);
      to += line;
    }
  }

 private:
  std::shared_ptr<ThreadPool> pool_;
  std::string name_;
  std::int64_t axis_;
};

class Split final : public Step {
 public:
  Split(const Node& node, const Context& context)
      : pool_(context.pool),
        name_(to_string(node)),
        axis_(node.integer("axis", 0)),
        sizes_(node.integers("split")),
        parts_(node.integer("num_outputs", static_cast<std::int64_t>(node.outputs.size()))) {
    if (parts_ != static_cast<std::int64_t>(node.outputs.size()))
      fail("[", name_, "] expected num_outputs = ", node.outputs.size(), ", got ", parts_);
  }

  std::optional<Slicing> slicing(const Node& node) const override {
    if (!is_last_axis(*node.input(0), axis_)) return std::nullopt;
    return slice_rows(node, {0}, 1);
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& whole = inputs[0].shape;
    const int axis = static_cast<int>(wrap(name_, axis_, whole.rank()));
    const auto parts = static_cast<std::int64_t>(outputs.size());
    // Before version 13 sizes were an attribute.
    const bool as_input = is_given(inputs, 1);
    const bool given = as_input || !sizes_.empty();
    const std::int64_t sizes =
        as_input ? inputs[1].shape.elements() : static_cast<std::int64_t>(sizes_.size());
    if (given && sizes != parts) fail("[", name_, "] expected ", parts, " sizes, got ", sizes);
    const std::int64_t equal = (whole[axis] + parts - 1) / parts;
    std::int64_t sum = 0;
    for (std::int64_t part = 0; part < parts; ++part) {
      // Without sizes, all are equal but for the last, which may be smaller.
      const std::int64_t size = as_input ? integer_at(inputs[1], part)
                                : given  ? sizes_[static_cast<std::size_t>(part)]
                                         : std::min(equal, whole[axis] - sum);
      if (size < 0 || size > whole[axis] - sum)
        fail("[", name_, "] expected sizes of 0 and more that add up to ", whole[axis], ", got ",
             size);
      outputs[static_cast<std::size_t>(part)] = whole;
      outputs[static_cast<std::size_t>(part)][axis] = size;
      sum += size;
    }
    if (sum != whole[axis])
      fail("[", name_, "] expected sizes that add up to ", whole[axis], ", got ", sum);
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const std::int64_t axis = wrap(name_, axis_, inputs[0].shape.rank());
    const Lines whole(inputs[0], axis);
    const auto size = [axis](const Tensor& tensor) {
      return static_cast<std::size_t>(tensor.shape[static_cast<int>(axis)]);
    };
    const auto* from = inputs[0].as<const std::byte>();
    for (const Tensor& output : outputs) {
      const std::size_t line = size(output) * whole.bytes;
      if (output.data != nullptr)
        copy_lines(*pool_, whole.lines, line, from, size(inputs[0]) * whole.bytes,
                   output.as<std::byte>(), line);
      from += line;
    }
  }

 private:
  std::shared_ptr<ThreadPool> pool_;
  std::string name_;
  std::int64_t axis_;
  std::vector<std::int64_t> sizes_;
  std::int64_t parts_;
};

class Slice final : public Step {
 public:
  Slice(const Node& node, const Context& /*context*/) : name_(to_string(node)) {}

  std::optional<Slicing> slicing(const Node& node) const override {
    const Value* axes = node.input(3);
    if (axes == nullptr || axes->constant == nullptr || !axes->shape) return std::nullopt;
    const Tensor known{const_cast<void*>(axes->constant), axes->type, *axes->shape};
    for (std::int64_t i = 0; i < known.shape.elements(); ++i) {
      if (!is_last_axis(*node.input(0), integer_at(known, i))) return std::nullopt;
    }
    return slice_rows(node, {0}, 1);
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
    auto* target = outputs[0].as<std::byte>();
    copy(inputs[0].shape, ranges(inputs), 0, inputs[0].as<const std::byte>(), inputs[0].bytes(),
         target);
  }

 private:
  struct Range {
    std::int64_t first = 0;
    std::int64_t count = 0;
    std::int64_t step = 1;
  };
  using Ranges = std::array<Range, Shape::kMaxRank>;

  Ranges ranges(std::span<const Tensor> inputs) const {
    const Shape& shape = inputs[0].shape;
    Ranges ranges{};
    for (int axis = 0; axis < shape.rank(); ++axis)
      ranges[static_cast<std::size_t>(axis)].count = shape[axis];
    const auto given = [&](std::size_t input) { return is_given(inputs, input); };
    AxisSet cut;
    for (std::int64_t i = 0; i < inputs[1].shape.elements(); ++i) {
      const std::int64_t axis = wrap(name_, given(3) ? integer_at(inputs[3], i) : i, shape.rank());
      if (cut.has(axis)) fail("[", name_, "] expected each axis once, got axis ", axis, " twice");
      cut.add(axis);
      ranges[static_cast<std::size_t>(axis)] =
          range(shape[static_cast<int>(axis)], integer_at(inputs[1], i), integer_at(inputs[2], i),
                given(4) ? integer_at(inputs[4], i) : 1);
    }
    return ranges;
  }

  // The indices that an axis of `size` has from `start` on, until `end`. Both count from the axis's
  // end if they are negative, and are clamped to the axis. The largest int64 or int32 means no end,
  // also backwards. ONNX Runtime then continues to the last element, and exporters rely on this.
  Range range(std::int64_t size, std::int64_t start, std::int64_t end, std::int64_t step) const {
    if (step == 0) fail("[", name_, "] expected steps other than 0");
    if (size == 0) return {};
    const bool back = step < 0;
    const auto place = [&](std::int64_t index, std::int64_t lowest, std::int64_t highest) {
      return std::clamp(index < 0 ? index + size : index, lowest, highest);
    };
    const std::int64_t first = place(start, 0, back ? size - 1 : size);
    const bool endless = end == std::numeric_limits<std::int64_t>::max() ||
                         end == std::numeric_limits<std::int32_t>::max();
    const std::int64_t stop =
        back && endless ? -1 : place(end, back ? -1 : 0, back ? size - 1 : size);
    if (back ? stop >= first : stop <= first) return {};
    return {first, (stop - first + (back ? 1 : -1)) / step + 1, step};
  }

  // Copies the parts that the ranges select of the `bytes` bytes that the axes from `axis` on span.
  // If all later axes are whole, consecutive indices of an axis are one copy.
  static void copy(const Shape& shape, const Ranges& ranges, int axis, const std::byte* source,
                   std::size_t bytes, std::byte*& target) {
    const auto put = [&target](const std::byte* from, std::size_t size) {
      std::memcpy(target, from, size);
      target += size;
    };
    if (axis == shape.rank()) return put(source, bytes);
    const Range& range = ranges[static_cast<std::size_t>(axis)];
    const std::size_t line = bytes / static_cast<std::size_t>(shape[axis]);
    if (range.step == 1 && is_whole(shape, ranges, axis + 1)) {
      return put(source + static_cast<std::size_t>(range.first) * line,
                 static_cast<std::size_t>(range.count) * line);
    }
    for (std::int64_t i = 0; i < range.count; ++i) {
      const std::int64_t index = range.first + i * range.step;
      copy(shape, ranges, axis + 1, source + static_cast<std::size_t>(index) * line, line, target);
    }
  }

  // Whether the axes from `axis` on are taken whole.
  static bool is_whole(const Shape& shape, const Ranges& ranges, int axis) {
    for (; axis < shape.rank(); ++axis) {
      const Range& range = ranges[static_cast<std::size_t>(axis)];
      if (range.count != shape[axis] || range.step != 1) return false;
    }
    return true;
  }

  std::string name_;
};

constexpr Port kConcat[] = {
    {.name = "inputs", .presence = Presence::kVariadic, .type_letter = 'T'}};
constexpr Port kOutput[] = {{.name = "output", .type_letter = 'T'}};
constexpr AttributeRule kAxisGiven[] = {required(axis("axis"))};
constexpr Port kSplit[] = {{.name = "input", .type_letter = 'T'},
                           optional({.name = "split", .types = kInt64, .shape = "[P]"})};
constexpr Port kParts[] = {
    {.name = "outputs", .presence = Presence::kVariadic, .type_letter = 'T'}};
constexpr AttributeRule kSizes[] = {axis("axis"), integers("split", 0), count("num_outputs", 1)};
constexpr Port kSlice[] = {
    {.name = "data", .type_letter = 'T'},
    {.name = "starts", .types = kIntegers, .shape = "[A]", .type_letter = 'I'},
    {.name = "ends", .types = kIntegers, .shape = "[A]", .type_letter = 'I'},
    optional({.name = "axes", .types = kIntegers, .shape = "[A]", .type_letter = 'I'}),
    optional({.name = "steps", .types = kIntegers, .shape = "[A]", .type_letter = 'I'})};

constexpr Operator kOperators[] = {
    {{"", "Concat", 4, 13, kConcat, kOutput, kAxisGiven}, make<Concat>},
    {{"", "Split", 2, 18, kSplit, kParts, kSizes}, make<Split>},
    {{"", "Slice", 10, 13, kSlice, kOutput}, make<Slice>},
};

}  // namespace

std::span<const Operator> part_operators() { return kOperators; }

}  // namespace flownpu::cpu
