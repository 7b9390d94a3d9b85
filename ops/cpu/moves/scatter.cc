// SPDX-License-Identifier: Apache-2.0
// Operators that read or write elements where another tensor says: GatherElements, ScatterND; and
// Trilu, which keeps a triangle of each matrix. Exports make attention masks of these.
#include <algorithm>
#include <cstring>
#include <string>

#include "ops/cpu/elements.h"
#include "ops/cpu/integers.h"
#include "ops/cpu/step.h"

namespace flownpu::cpu {
namespace {

// y[i][j][k] = x[i][indices[i][j][k]][k] for the axis 1.
class GatherElements final : public Step {
 public:
  GatherElements(const Node& node, const Context& /*context*/)
      : name_(to_string(node)), axis_(node.integer("axis", 0)) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& x = inputs[0].shape;
    const Shape& indices = inputs[1].shape;
    const auto axis = static_cast<int>(wrap(name_, axis_, x.rank()));
    bool fits = x.rank() == indices.rank();
    for (int i = 0; fits && i < x.rank(); ++i) fits = i == axis || indices[i] <= x[i];
    if (!fits)
      fail("[", name_, "] expected indices that lie within data except along axis ", axis, ", got ",
           to_string(indices), " and ", to_string(x));
    outputs[0] = indices;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const Shape& x = inputs[0].shape;
    const Shape& to = inputs[1].shape;
    const auto axis = static_cast<int>(wrap(name_, axis_, x.rank()));
    with_bytes(outputs[0].type, [&]<typename T> {
      for (std::int64_t i = 0; i < to.elements(); ++i) {
        std::int64_t rest = i;
        std::int64_t at = 0;
        std::int64_t stride = 1;
        for (int a = x.rank() - 1; a >= 0; --a) {
          const std::int64_t index =
              a == axis ? wrap(name_, integer_at(inputs[1], i), x[axis]) : rest % to[a];
          rest /= to[a];
          at += index * stride;
          stride *= x[a];
        }
        outputs[0].as<T>()[i] = inputs[0].as<const T>()[at];
      }
    });
  }

 private:
  std::string name_;
  std::int64_t axis_;
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
constexpr Port kScatter[] = {{.name = "data", .type_letter = 'T'},
                             {.name = "indices", .types = kInt64, .shape = "[..,I]"},
                             {.name = "updates", .type_letter = 'T'}};
constexpr Port kMatrices[] = {
    {.name = "input", .shape = "[..,?,?]", .type_letter = 'T'},
    {.name = "k", .types = kInt64, .presence = Presence::kOptional, .shape = "[]"}};
constexpr Port kOutput[] = {{.name = "output", .type_letter = 'T'}};
constexpr AttributeRule kAxis[] = {axis("axis")};
constexpr AttributeRule kReplace[] = {text("reduction", "none")};
constexpr AttributeRule kUpper[] = {flag("upper")};

constexpr Operator kOperators[] = {
    {{"", "GatherElements", 11, 13, kElements, kOutput, kAxis}, make<GatherElements>},
    {{"", "ScatterND", 11, 18, kScatter, kOutput, kReplace}, make<ScatterNd>},
    {{"", "Trilu", 14, 14, kMatrices, kOutput, kUpper}, make<Trilu>},
};

}  // namespace

std::span<const Operator> scatter_operators() { return kOperators; }

}  // namespace flownpu::cpu
