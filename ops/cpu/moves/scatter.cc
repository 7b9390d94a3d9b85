// SPDX-License-Identifier: Apache-2.0
// Operators that read or write elements where another tensor says: GatherElements,
// ScatterElements, ScatterND; and Trilu, which keeps a triangle of each matrix. Exports make
// attention masks of these.
#include <algorithm>
#include <cstring>
#include <string>

#include "ops/cpu/elements.h"
#include "ops/cpu/integers.h"
#include "ops/cpu/step.h"

namespace flownpu::cpu {
namespace {

// The indices' element i is of x's element [..][indices[i]][..], with all other places those of i.
class ElementsAlongAxis : public Step {
 public:
  ElementsAlongAxis(const Node& node, const Context& /*context*/)
      : name_(to_string(node)), axis_(node.integer("axis", 0)) {}

 protected:
  // Throws Error unless the indices lie within x. `axis`: one along which they need not, or -1.
  void check(const Shape& x, const Shape& indices, int axis) const {
    bool fits = x.rank() == indices.rank();
    for (int i = 0; fits && i < x.rank(); ++i) fits = i == axis || indices[i] <= x[i];
    if (!fits)
      fail("[", name_, "] expected indices that lie within data except along axis ", axis, ", got ",
           to_string(indices), " and ", to_string(x));
  }

  int axis_of(const Shape& x) const { return static_cast<int>(wrap(name_, axis_, x.rank())); }

  // Calls function(i, place in x) for each index.
  template <typename Function>
  void each(const Shape& x, const Tensor& indices, const Function& function) const {
    const Shape& to = indices.shape;
    const int axis = axis_of(x);
    for (std::int64_t i = 0; i < to.elements(); ++i) {
      std::int64_t rest = i;
      std::int64_t at = 0;
      std::int64_t stride = 1;
      for (int a = x.rank() - 1; a >= 0; --a) {
        const std::int64_t index =
            a == axis ? wrap(name_, integer_at(indices, i), x[axis]) : rest % to[a];
        rest /= to[a];
        at += index * stride;
        stride *= x[a];
      }
      function(i, at);
    }
  }

  std::string name_;

 private:
  std::int64_t axis_;
};

// y[i][j][k] = x[i][indices[i][j][k]][k] for the axis 1.
class GatherElements final : public ElementsAlongAxis {
 public:
  using ElementsAlongAxis::ElementsAlongAxis;

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    check(inputs[0].shape, inputs[1].shape, axis_of(inputs[0].shape));
    outputs[0] = inputs[1].shape;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    with_bytes(outputs[0].type, [&]<typename T> {
      each(inputs[0].shape, inputs[1], [&](std::int64_t i, std::int64_t at) {
        outputs[0].as<T>()[i] = inputs[0].as<const T>()[at];
      });
    });
  }
};

// A copy of data, in which y[i][indices[i][j][k]][k] = updates[i][j][k] for the axis 1.
class ScatterElements final : public ElementsAlongAxis {
 public:
  using ElementsAlongAxis::ElementsAlongAxis;

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& indices = inputs[1].shape;
    check(inputs[0].shape, indices, -1);
    if (inputs[2].shape != indices)
      fail("[", name_, "] expected updates of shape ", to_string(indices), ", got ",
           to_string(inputs[2].shape));
    outputs[0] = inputs[0].shape;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    if (outputs[0].bytes() == 0) return;
    std::memcpy(outputs[0].data, inputs[0].data, outputs[0].bytes());
    with_bytes(outputs[0].type, [&]<typename T> {
      each(outputs[0].shape, inputs[1], [&](std::int64_t i, std::int64_t at) {
        outputs[0].as<T>()[at] = inputs[2].as<const T>()[i];
      });
    });
  }
};

// A copy of data in which updates replace the parts that the rows of indices name.
class ScatterNd final : public Step {
 public:
  ScatterNd(const Node& node, const Context& /*context*/) : name_(to_string(node)) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& data = inputs[0].shape;
    const Shape& indices = inputs[1].shape;
    if (indices[-1] > data.rank())
      fail("[", name_, "] expected indices of at most ", data.rank(), " axes, got ", indices[-1]);
    Shape updates(indices.begin(), static_cast<std::size_t>(indices.rank() - 1));
    for (auto axis = static_cast<int>(indices[-1]); axis < data.rank(); ++axis)
      updates.append(data[axis]);
    if (!(updates == inputs[2].shape))
      fail("[", name_, "] expected updates of shape ", to_string(updates), ", got ",
           to_string(inputs[2].shape));
    outputs[0] = data;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const Shape& data = outputs[0].shape;
    if (outputs[0].bytes() == 0) return;
    std::memcpy(outputs[0].data, inputs[0].data, outputs[0].bytes());
    const auto axes = static_cast<int>(inputs[1].shape[-1]);
    const std::int64_t rows =
        inputs[2].shape.elements() == 0 ? 0 : inputs[1].shape.elements() / std::max(axes, 1);
    std::size_t bytes = size_of(outputs[0].type);
    for (int axis = axes; axis < data.rank(); ++axis) bytes *= static_cast<std::size_t>(data[axis]);
    for (std::int64_t row = 0; row < rows; ++row) {
      std::int64_t at = 0;
      for (int axis = 0; axis < axes; ++axis)
        at = at * data[axis] + wrap(name_, integer_at(inputs[1], row * axes + axis), data[axis]);
      std::memcpy(outputs[0].as<std::byte>() + static_cast<std::size_t>(at) * bytes,
                  inputs[2].as<const std::byte>() + static_cast<std::size_t>(row) * bytes, bytes);
    }
  }

 private:
  std::string name_;
};

// Elements [i][j] with j >= i + k (upper) or j <= i + k of each matrix; the others are 0.
class Trilu final : public Step {
 public:
  Trilu(const Node& node, const Context& context)
      : context_(context), upper_(node.integer("upper", 1) != 0) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    outputs[0] = inputs[0].shape;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const std::int64_t columns = outputs[0].shape[-1];
    const std::int64_t height = outputs[0].shape[-2];
    const std::int64_t rows = columns == 0 ? 0 : outputs[0].shape.elements() / columns;
    const std::int64_t k = is_given(inputs, 1) ? integer_at(inputs[1], 0) : 0;
    with_bytes(outputs[0].type, [&]<typename T> {
      context_.pool->run_rows(rows, [&](std::int64_t row) {
        const T* from = inputs[0].as<const T>() + row * columns;
        T* to = outputs[0].as<T>() + row * columns;
        // Diagonals far outside of the matrix must not overflow the sum.
        const std::int64_t diagonal =
            row % height + std::clamp<std::int64_t>(k, -height - columns, height + columns);
        for (std::int64_t i = 0; i < columns; ++i)
          to[i] = (upper_ ? i >= diagonal : i <= diagonal) ? from[i] : T{};
      });
    });
  }

 private:
  Context context_;
  bool upper_;
};

constexpr Port kElements[] = {{.name = "data", .type_letter = 'T'},
                              {.name = "indices", .types = kIntegers}};
constexpr Port kNewElements[] = {{.name = "data", .type_letter = 'T'},
                                 {.name = "indices", .types = kIntegers},
                                 {.name = "updates", .type_letter = 'T'}};
constexpr Port kScatter[] = {{.name = "data", .type_letter = 'T'},
                             {.name = "indices", .types = kInt64, .shape = "[..,I]"},
                             {.name = "updates", .type_letter = 'T'}};
constexpr Port kMatrices[] = {
    {.name = "input", .shape = "[..,?,?]", .type_letter = 'T'},
    {.name = "k", .types = kInt64, .presence = Presence::kOptional, .shape = "[]"}};
constexpr Port kOutput[] = {{.name = "output", .type_letter = 'T'}};
constexpr AttributeRule kAxis[] = {axis("axis")};
constexpr AttributeRule kReplace[] = {text("reduction", "none")};
constexpr AttributeRule kReplaceAlong[] = {axis("axis"), text("reduction", "none")};
constexpr AttributeRule kUpper[] = {flag("upper")};

constexpr Operator kOperators[] = {
    {{"", "GatherElements", 11, 13, kElements, kOutput, kAxis}, make<GatherElements>},
    {{"", "ScatterElements", 11, 18, kNewElements, kOutput, kReplaceAlong}, make<ScatterElements>},
    {{"", "ScatterND", 11, 18, kScatter, kOutput, kReplace}, make<ScatterNd>},
    {{"", "Trilu", 14, 14, kMatrices, kOutput, kUpper}, make<Trilu>},
};

}  // namespace

std::span<const Operator> scatter_operators() { return kOperators; }

}  // namespace flownpu::cpu
