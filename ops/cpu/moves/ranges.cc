// SPDX-License-Identifier: Apache-2.0
// Operators that make tensors of numbers: Range, and ConstantOfShape.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "ops/cpu/broadcast.h"
#include "ops/cpu/elements.h"
#include "ops/cpu/integers.h"
#include "ops/cpu/step.h"

namespace flownpu::cpu {
namespace {

// A bound that no memory holds, small enough that a count of bytes does not overflow.
constexpr std::uint64_t kMostElements = std::uint64_t{1} << 48;

class Range final : public Step {
 public:
  Range(const Node& node, const Context& /*context*/) : name_(to_string(node)) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    for (std::size_t i = 0; i < 3; ++i) {
      if (inputs[i].shape.elements() != 1)
        fail("[", name_, "] expected one element in input ", i, ", got ",
             to_string(inputs[i].shape));
    }
    with_number(inputs[0].type, [&]<typename T> {
      outputs[0] = Shape{
          count(*inputs[0].as<const T>(), *inputs[1].as<const T>(), *inputs[2].as<const T>())};
    });
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    with_number(outputs[0].type, [&]<typename T> {
      const T start = *inputs[0].as<const T>();
      const T delta = *inputs[2].as<const T>();
      auto* y = outputs[0].as<T>();
      for (std::int64_t i = 0; i < outputs[0].shape[0]; ++i) y[i] = element(start, delta, i);
    });
  }

 private:
  // start + i delta. The product of integers may overflow where the sum does not, so it wraps
  // around.
  template <typename T>
  static T element(T start, T delta, std::int64_t i) {
    if constexpr (std::is_integral_v<T>) {
      const auto offset = static_cast<std::uint64_t>(i) * static_cast<std::uint64_t>(delta);
      return static_cast<T>(static_cast<std::uint64_t>(start) + offset);
    } else {
      return start + static_cast<T>(i) * delta;
    }
  }

  // How many numbers start, start + delta .. there are before the limit.
  template <typename T>
  std::int64_t count(T start, T limit, T delta) const {
    if (delta == 0) fail("[", name_, "] expected a delta other than 0");
    if (delta > 0 ? !(start < limit) : !(start > limit)) return 0;
    std::uint64_t steps = 0;
    if constexpr (std::is_integral_v<T>) {
      // Distances may be too long for a signed integer.
      const auto from = static_cast<std::uint64_t>(delta > 0 ? start : limit);
      const auto to = static_cast<std::uint64_t>(delta > 0 ? limit : start);
      const auto wide = static_cast<std::uint64_t>(delta);
      steps = (to - from - 1) / (delta > 0 ? wide : 0 - wide) + 1;
    } else {
      const double exact = std::ceil((static_cast<double>(limit) - start) / delta);
      steps = exact < static_cast<double>(kMostElements) ? static_cast<std::uint64_t>(exact)
                                                         : kMostElements + 1;
    }
    if (steps > kMostElements)
      fail("[", name_, "] expected a range that fits memory, got ", start, " to ", limit, " by ",
           delta);
    return static_cast<std::int64_t>(steps);
  }

  std::string name_;
};

// Its attribute `value`, a tensor of one element, is its second input; without it, 0.0.
class ConstantOfShape final : public Step {
 public:
  ConstantOfShape(const Node& node, const Context& context)
      : context_(context), name_(to_string(node)) {
    const Value* value = node.input(1);
    if (value != nullptr && (!value->shape || value->shape->elements() != 1))
      fail("[", name_, "] expected a value of one element");
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    outputs[0] = shape_in(name_, inputs[0]);
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    with_bytes(outputs[0].type, [&]<typename T> {
      const T value = inputs.size() > 1 ? *inputs[1].as<const T>() : T{0};
      in_parallel(*context_.pool, outputs[0].shape.elements(), [&](auto begin, auto end) {
        std::fill(outputs[0].as<T>() + begin, outputs[0].as<T>() + end, value);
      });
    });
  }

 private:
  Context context_;
  std::string name_;
};

constexpr Port kRange[] = {{.name = "start", .types = kNumbers, .type_letter = 'T'},
                           {.name = "limit", .types = kNumbers, .type_letter = 'T'},
                           {.name = "delta", .types = kNumbers, .type_letter = 'T'}};
constexpr Port kNumber[] = {{.name = "output", .types = kNumbers, .type_letter = 'T'}};
// stash_type is the type in which 16-bit floats are computed; this device does not take such
// floats.
constexpr AttributeRule kStash[] = {integer("stash_type", 0, 16)};
constexpr Port kShape[] = {
    {.name = "input", .types = kInt64, .shape = "[R]"},
    {.name = "value", .presence = Presence::kAttribute, .type_letter = 'T', .constant = true}};
constexpr Port kFilled[] = {{.name = "output", .type_letter = 'T'}};

constexpr Operator kOperators[] = {
    {{"", "Range", 11, 27, kRange, kNumber, kStash}, make<Range>},
    {{"", "ConstantOfShape", 9, 25, kShape, kFilled}, make<ConstantOfShape>},
};

}  // namespace

std::span<const Operator> range_operators() { return kOperators; }

}  // namespace flownpu::cpu
