// SPDX-License-Identifier: Apache-2.0
// TopK: the largest or smallest elements of each line along an axis, and their places in it.
// Routers of experts are made of it.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>

#include "ops/cpu/elements.h"
#include "ops/cpu/integers.h"
#include "ops/cpu/rows.h"
#include "ops/cpu/step.h"

namespace flownpu::cpu {
namespace {

class TopK final : public Step {
 public:
  TopK(const Node& node, const Context& context)
      : context_(context),
        name_(to_string(node)),
        axis_(node.integer("axis", -1)),
        largest_(node.integer("largest", 1) != 0) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    Shape shape = inputs[0].shape;
    const auto axis = static_cast<int>(wrap(name_, axis_, shape.rank()));
    if (inputs[1].shape.elements() != 1)
      fail("[", name_, "] expected one K, got ", inputs[1].shape.elements());
    const std::int64_t k = integer_at(inputs[1], 0);
    if (k < 0 || k > shape[axis])
      fail("[", name_, "] expected a K of 0 to ", shape[axis], ", got ", k);
    shape[axis] = k;
    for (Shape& output : outputs) output = shape;
  }

  // Places of all elements, which are sorted.
  std::size_t scratch_bytes(std::span<const Tensor> inputs) const override {
    return static_cast<std::size_t>(inputs[0].shape.elements()) * sizeof(std::int64_t);
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> scratch) const override {
    const Shape& shape = inputs[0].shape;
    const std::int64_t axis = wrap(name_, axis_, shape.rank());
    const std::int64_t size = shape[static_cast<int>(axis)];
    const std::int64_t after = elements_of(shape, axis + 1, shape.rank());
    const std::int64_t k = integer_at(inputs[1], 0);
    auto* places = reinterpret_cast<std::int64_t*>(scratch.data());
    with_number(inputs[0].type, [&]<typename T> {
      context_.pool->run_rows(elements_of(shape, 0, axis) * after, [&](std::int64_t line) {
        const T* x = inputs[0].as<const T>() + line / after * size * after + line % after;
        std::int64_t* first = places + line * size;
        std::iota(first, first + size, 0);
        std::partial_sort(first, first + k, first + size, [&](std::int64_t a, std::int64_t b) {
          return comes_first(x[a * after], x[b * after], a < b);
        });
        for (std::int64_t i = 0; i < k; ++i) {
          const std::int64_t at = (line / after * k + i) * after + line % after;
          if (outputs[0].present()) outputs[0].as<T>()[at] = x[first[i] * after];
          if (outputs[1].present()) outputs[1].as<std::int64_t>()[at] = first[i];
        }
      });
    });
  }

 private:
  // Among equal elements the one with the lower place. NaN counts as the largest.
  template <typename T>
  bool comes_first(T a, T b, bool is_lower) const {
    if (is_nan(a) || is_nan(b)) return is_nan(a) && is_nan(b) ? is_lower : is_nan(a) == largest_;
    if (a == b) return is_lower;
    return largest_ ? a > b : a < b;
  }

  Context context_;
  std::string name_;
  std::int64_t axis_;
  bool largest_;
};

constexpr Port kInputs[] = {{.name = "X", .types = kNumbers, .type_letter = 'T'},
                            {.name = "K", .types = kInt64}};
constexpr Port kOutputs[] = {optional({.name = "Values", .types = kNumbers, .type_letter = 'T'}),
                             optional({.name = "Indices", .types = kInt64})};
constexpr AttributeRule kAttributes[] = {axis("axis"), flag("largest"), flag("sorted")};

constexpr Operator kOperators[] = {
    {{"", "TopK", 11, 24, kInputs, kOutputs, kAttributes}, make<TopK>}};

}  // namespace

std::span<const Operator> top_k_operators() { return kOperators; }

}  // namespace flownpu::cpu
