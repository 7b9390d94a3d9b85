// SPDX-License-Identifier: Apache-2.0
// Sums, means and extremes over axes, and ArgMax. Graphs use them for the number of a mask's
// tokens, the norm of an embedding, and the place of a text's last token.
#include <algorithm>
#include <type_traits>

#include "ops/cpu/broadcast.h"
#include "ops/cpu/elements.h"
#include "ops/cpu/integers.h"
#include "ops/cpu/reductions/totals.h"
#include "ops/cpu/step.h"
#include "ops/cpu/widened.h"

namespace flownpu::cpu {
namespace {

// The shape with size 1 where it is reduced, or (not `keep`) without these axes.
Shape reduced_shape(const Shape& shape, const AxisSet& axes, bool keep) {
  Shape reduced;
  for (int axis = 0; axis < shape.rank(); ++axis) {
    if (!axes.has(axis)) {
      reduced.append(shape[axis]);
    } else if (keep) {
      reduced.append(1);
    }
  }
  return reduced;
}

template <typename Function>
class Reduce final : public Step {
 public:
  Reduce(const Node& node, const Context& context)
      : context_(context),
        name_(to_string(node)),
        keep_(node.integer("keepdims", 1) != 0),
        all_(node.integer("noop_with_empty_axes", 0) == 0),
        first_(node.op_type.starts_with("Global") ? 2 : 0),
        axes_(node.integers("axes")) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    outputs[0] = reduced_shape(inputs[0].shape, axes(inputs), keep_);
  }

  // A total for each result.
  std::size_t scratch_bytes(std::span<const Tensor> inputs) const override {
    const auto results = reduced_shape(inputs[0].shape, axes(inputs), keep_).elements();
    std::size_t bytes = 0;
    with_number(inputs[0].type, [&]<typename T> { bytes = sizeof(Total<T>); });
    return static_cast<std::size_t>(results) * bytes;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> scratch) const override {
    with_number(outputs[0].type, [&]<typename T> {
      reduce<T>(inputs, outputs[0], reinterpret_cast<Total<T>*>(scratch.data()));
    });
  }

 private:
  template <typename T>
  using Total = typename Function::template Total<T>;

  // Before opset 18 (ReduceSum: 13) axes were an attribute. No axes mean all of them, unless
  // noop_with_empty_axes is set.
  AxisSet axes(std::span<const Tensor> inputs) const {
    const Shape& shape = inputs[0].shape;
    AxisSet axes;
    if (inputs.size() > 1 && inputs[1].present() && inputs[1].shape.elements() > 0)
      return axes_in(name_, inputs[1], shape.rank());
    for (const std::int64_t axis : axes_) axes.add(wrap(name_, axis, shape.rank()));
    if (axes_.empty() && all_) {
      for (int axis = first_; axis < shape.rank(); ++axis) axes.add(axis);
    }
    return axes;
  }

  // The output broadcasts to the input's shape: each input element is added to the result at its
  // place.
  template <typename T>
  void reduce(std::span<const Tensor> inputs, const Tensor& output, Total<T>* totals) const {
    const Shape& shape = inputs[0].shape;
    const std::int64_t results = output.shape.elements();
    if (results == 0) return;
    const std::int64_t each = shape.elements() / results;
    if (std::is_same_v<Function, Mean> && std::is_integral_v<T> && each == 0)
      fail("[", name_, "] expected elements, got none");
    const Shape kept = reduced_shape(shape, axes(inputs), true);
    const auto* x = inputs[0].as<const T>();
    const Broadcast<1> broadcast(shape, {&kept});
    // Threads share the results along the axes before the first reduced one.
    std::int64_t parts = 1;
    for (int axis = 0; axis < shape.rank() && kept[axis] == shape[axis]; ++axis)
      parts *= shape[axis];
    const std::int64_t part = results / parts;
    const std::int64_t parts_each =
        std::max<std::int64_t>(1, kElementsEach / std::max<std::int64_t>(part * each, 1));
    context_.pool->run((parts + parts_each - 1) / parts_each, [&](std::int64_t task) {
      const std::int64_t begin = task * parts_each * part;
      const std::int64_t end = std::min(begin + parts_each * part, results);
      std::fill(totals + begin, totals + end, Function::template start<T>());
      broadcast.walk(begin * each, end * each, [&](auto first, auto count, const auto& offsets) {
        add_run(x + first, count, totals + offsets[0], broadcast.step(0) == 0);
      });
      std::transform(totals + begin, totals + end, output.as<T>() + begin,
                     [each](Total<T> total) { return Function::template finish<T>(total, each); });
    });
  }

  // Adds x[count] to one total, or to a total each.
  template <typename T>
  void add_run(const T* x, std::int64_t count, Total<T>* totals, bool to_one) const {
    if constexpr (std::is_same_v<T, float>) {
      if (to_one) return Function::add_row(context_.kernels, x, count, *totals);
    }
    if constexpr (std::is_same_v<Total<T>, double>) {
      return context_.kernels.add_to_totals(x, totals, count);
    }
    with_step(to_one ? 0 : 1, [&](auto step) {
      for (std::int64_t i = 0; i < count; ++i)
        totals[i * step] = Function::template add<T>(totals[i * step], x[i]);
    });
  }

  Context context_;
  std::string name_;
  bool keep_;
  bool all_;
  // The first of all axes: a global pool reduces those behind images and channels.
  int first_;
  std::vector<std::int64_t> axes_;
};

// As in ONNX Runtime, NaN counts as the largest if it comes first, and never otherwise.
class ArgMax final : public Step {
 public:
  ArgMax(const Node& node, const Context& /*context*/)
      : name_(to_string(node)),
        axis_(node.integer("axis", 0)),
        keep_(node.integer("keepdims", 1) != 0),
        last_(node.integer("select_last_index", 0) != 0) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& shape = inputs[0].shape;
    AxisSet axes;
    axes.add(wrap(name_, axis_, shape.rank()));
    outputs[0] = reduced_shape(shape, axes, keep_);
    if (outputs[0].elements() > 0 && shape.elements() == 0)
      fail("[", name_, "] expected elements along axis ", axis_, ", got ", to_string(shape));
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    with_number(inputs[0].type, [&]<typename T> { find<T>(inputs[0], outputs[0]); });
  }

 private:
  template <typename T>
  void find(const Tensor& input, const Tensor& output) const {
    const Shape& shape = input.shape;
    const int axis = static_cast<int>(wrap(name_, axis_, shape.rank()));
    const std::int64_t inner =
        Shape(shape.begin() + axis + 1, static_cast<std::size_t>(shape.rank() - axis - 1))
            .elements();
    const auto* x = input.as<const T>();
    auto* y = output.as<std::int64_t>();
    for (std::int64_t i = 0; i < output.shape.elements(); ++i) {
      const T* line = x + i / inner * shape[axis] * inner + i % inner;
      std::int64_t best = 0;
      for (std::int64_t j = 1; j < shape[axis]; ++j) {
        const T candidate = line[j * inner];
        const T largest = line[best * inner];
        if (candidate > largest || (last_ && candidate == largest)) best = j;
      }
      y[i] = best;
    }
  }

  std::string name_;
  std::int64_t axis_;
  bool keep_;
  bool last_;
};

constexpr Port kReduced[] = {{.name = "data", .types = kNumbersAndFloats, .type_letter = 'T'},
                             optional({.name = "axes", .types = kInt64, .shape = "[A]"})};
constexpr Port kResult[] = {{.name = "reduced", .types = kNumbersAndFloats, .type_letter = 'T'}};
constexpr AttributeRule kReduce[] = {integers("axes", -Shape::kMaxRank, Shape::kMaxRank - 1),
                                     flag("keepdims"), flag("noop_with_empty_axes")};
constexpr Port kSearched[] = {{.name = "data", .types = kNumbersAndFloats}};
constexpr Port kIndex[] = {{.name = "reduced", .types = kInt64}};
constexpr AttributeRule kArgMax[] = {axis("axis"), flag("keepdims"), flag("select_last_index")};

constexpr Port kImages[] = {
    {.name = "X", .types = kFloats, .shape = "[..,?,?,?]", .type_letter = 'T'}};
constexpr Port kY[] = {{.name = "Y", .types = kFloats, .type_letter = 'T'}};

constexpr Operator kOperators[] = {
    {{"", "GlobalAveragePool", 1, 22, kImages, kY}, widened<make<Reduce<Mean>>>},
    {{"", "GlobalMaxPool", 1, 22, kImages, kY}, widened<make<Reduce<Largest>>>},
    {{"", "ReduceSum", 1, 13, kReduced, kResult, kReduce}, widened<make<Reduce<Sum>>>},
    {{"", "ReduceMean", 1, 18, kReduced, kResult, kReduce}, widened<make<Reduce<Mean>>>},
    {{"", "ReduceMax", 1, 20, kReduced, kResult, kReduce}, widened<make<Reduce<Largest>>>},
    {{"", "ReduceMin", 1, 20, kReduced, kResult, kReduce}, widened<make<Reduce<Smallest>>>},
    {{"", "ArgMax", 1, 13, kSearched, kIndex, kArgMax}, widened<make<ArgMax>>},
};

}  // namespace

std::span<const Operator> reduce_operators() { return kOperators; }

}  // namespace flownpu::cpu
