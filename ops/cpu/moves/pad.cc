// SPDX-License-Identifier: Apache-2.0
// Pad: adds elements before and after those of each axis, or takes some away.
#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "ops/cpu/elements.h"
#include "ops/cpu/integers.h"
#include "ops/cpu/step.h"

namespace flownpu::cpu {
namespace {

class Pad final : public Step {
 public:
  Pad(const Node& node, const Context& context)
      : context_(context), name_(to_string(node)), mode_(node.text("mode", "constant")) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& x = inputs[0].shape;
    const Pads pads = this->pads(inputs);
    if (is_given(inputs, 2) && inputs[2].shape.elements() != 1)
      fail("[", name_, "] expected one constant_value, got ", inputs[2].shape.elements());
    outputs[0] = x;
    for (int axis = 0; axis < x.rank(); ++axis) {
      const auto [head, tail] = pads[static_cast<std::size_t>(axis)];
      outputs[0][axis] = x[axis] + head + tail;
      check(x[axis], head, tail);
    }
    if (outputs[0].elements() > kMost)
      fail("[", name_, "] expected a result that fits in memory, got ", to_string(outputs[0]));
  }

  // The source's index, or kNone, for each index of each axis.
  std::size_t scratch_bytes(std::span<const Tensor> inputs) const override {
    std::array<Shape, 1> to;
    infer(inputs, to);
    std::int64_t indices = 0;
    for (const std::int64_t size : to[0]) indices += size;
    return static_cast<std::size_t>(indices) * sizeof(std::int64_t);
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> scratch) const override {
    const Shape& x = inputs[0].shape;
    const Shape& y = outputs[0].shape;
    if (y.elements() == 0) return;
    const Pads pads = this->pads(inputs);
    std::array<const std::int64_t*, Shape::kMaxRank> sources{};
    auto* next = reinterpret_cast<std::int64_t*>(scratch.data());
    for (int axis = 0; axis < y.rank(); ++axis) {
      const auto i = static_cast<std::size_t>(axis);
      sources[i] = next;
      for (std::int64_t at = 0; at < y[axis]; ++at) *next++ = source(at - pads[i].head, x[axis]);
    }
    with_bytes(outputs[0].type, [&]<typename T> {
      const T value = is_given(inputs, 2) ? *inputs[2].as<const T>() : T{};
      if (y.rank() == 0) {
        *outputs[0].as<T>() = *inputs[0].as<const T>();
        return;
      }
      const std::int64_t width = y[-1];
      context_.pool->run_rows(y.elements() / width, [&](std::int64_t row) {
        const std::int64_t line = source_line(row, x, y, sources);
        const auto* last = sources[static_cast<std::size_t>(y.rank() - 1)];
        const T* from = line == kNone ? nullptr : inputs[0].as<const T>() + line * x[-1];
        T* to = outputs[0].as<T>() + row * width;
        for (std::int64_t i = 0; i < width; ++i)
          to[i] = from == nullptr || last[i] == kNone ? value : from[last[i]];
      });
    });
  }

 private:
  struct Ends {
    std::int64_t head = 0;
    std::int64_t tail = 0;
  };
  using Pads = std::array<Ends, Shape::kMaxRank>;
  static constexpr std::int64_t kNone = -1;
  // More elements than a machine's memory holds, and few enough that sizes do not overflow.
  static constexpr std::int64_t kMost = std::int64_t{1} << 48;

  Pads pads(std::span<const Tensor> inputs) const {
    const std::int64_t rank = inputs[0].shape.rank();
    const bool some = is_given(inputs, 3);
    const std::int64_t axes = some ? inputs[3].shape.elements() : rank;
    if (inputs[1].shape.elements() != 2 * axes)
      fail("[", name_, "] expected ", 2 * axes, " pads, got ", inputs[1].shape.elements());
    if (some) axes_in(name_, inputs[3], rank);  // each once
    Pads pads{};
    for (std::int64_t i = 0; i < axes; ++i) {
      const std::int64_t axis = some ? wrap(name_, integer_at(inputs[3], i), rank) : i;
      const Ends ends{integer_at(inputs[1], i), integer_at(inputs[1], i + axes)};
      if (std::max(ends.head, ends.tail) > kMost || std::min(ends.head, ends.tail) < -kMost)
        fail("[", name_, "] expected pads of which a tensor fits in memory, got ", ends.head,
             " and ", ends.tail);
      pads[static_cast<std::size_t>(axis)] = ends;
    }
    return pads;
  }

  // Whether an axis of `size` elements may get these pads.
  void check(std::int64_t size, std::int64_t head, std::int64_t tail) const {
    if (size + head + tail < 0)
      fail("[", name_, "] expected pads that leave ", size, " elements or take some, got ", head,
           " and ", tail);
    if (mode_ == "constant" || (head == 0 && tail == 0)) return;
    // ONNX says nothing of repetitions of parts that other pads take away.
    const std::int64_t most = mode_ == "edge" || size == 0 ? size : size - 1;
    const bool is_repeated = mode_ == "edge" && size > 0;
    if (std::min(head, tail) < 0 || (!is_repeated && std::max(head, tail) > most))
      unsupported("[", name_, "] expected pads of 0 to ", most, " in mode ", mode_, ", got ", head,
                  " and ", tail);
  }

  // The index that an axis of `size` elements repeats at `at`, which may be outside.
  std::int64_t source(std::int64_t at, std::int64_t size) const {
    if (at >= 0 && at < size) return at;
    if (mode_ == "constant") return kNone;
    if (mode_ == "edge") return std::clamp<std::int64_t>(at, 0, size - 1);
    if (mode_ == "wrap") return at < 0 ? at + size : at - size;
    return at < 0 ? -at : 2 * (size - 1) - at;  // reflect
  }

  static std::int64_t source_line(std::int64_t row, const Shape& x, const Shape& y,
                                  const std::array<const std::int64_t*, Shape::kMaxRank>& sources) {
    std::int64_t line = 0;
    std::int64_t stride = 1;
    for (int axis = y.rank() - 2; axis >= 0; --axis) {
      const std::int64_t index = sources[static_cast<std::size_t>(axis)][row % y[axis]];
      if (index == kNone) return kNone;
      row /= y[axis];
      line += index * stride;
      stride *= x[axis];
    }
    return line;
  }

  Context context_;
  std::string name_;
  std::string mode_;
};

constexpr Port kInputs[] = {{.name = "data", .type_letter = 'T'},
                            {.name = "pads", .types = kInt64, .shape = "[P]"},
                            optional({.name = "constant_value", .type_letter = 'T'}),
                            optional({.name = "axes", .types = kIntegers, .shape = "[A]"})};
constexpr Port kOutputs[] = {{.name = "output", .type_letter = 'T'}};
constexpr AttributeRule kAttributes[] = {text("mode", "constant|reflect|edge|wrap")};

constexpr Operator kOperators[] = {
    {{"", "Pad", 11, 25, kInputs, kOutputs, kAttributes}, make<Pad>}};

}  // namespace

std::span<const Operator> pad_operators() { return kOperators; }

}  // namespace flownpu::cpu
