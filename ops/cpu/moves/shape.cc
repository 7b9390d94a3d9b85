// SPDX-License-Identifier: Apache-2.0
// Shape, and the look-ups by indices Gather and GatherND. They carry positions and masks from a
// graph's inputs to attention.
#include <algorithm>
#include <cstring>

#include "ops/cpu/elements.h"
#include "ops/cpu/integers.h"
#include "ops/cpu/step.h"

namespace flownpu::cpu {
namespace {

class ShapeOf final : public Step {
 public:
  ShapeOf(const Node& node, const Context& /*context*/)
      : start_(node.integer("start", 0)), end_(node.integer("end", Shape::kMaxRank)) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const auto [first, last] = range(inputs[0].shape);
    outputs[0] = Shape{last - first};
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const auto [first, last] = range(inputs[0].shape);
    std::copy(inputs[0].shape.begin() + first, inputs[0].shape.begin() + last,
              outputs[0].as<std::int64_t>());
  }

 private:
  std::pair<std::int64_t, std::int64_t> range(const Shape& shape) const {
    const std::int64_t rank = shape.rank();
    const std::int64_t first =
        std::clamp<std::int64_t>(start_ < 0 ? start_ + rank : start_, 0, rank);
    const std::int64_t last = std::clamp<std::int64_t>(end_ < 0 ? end_ + rank : end_, first, rank);
    return {first, last};
  }

  std::int64_t start_;
  std::int64_t end_;
};

class Gather final : public Step {
 public:
  Gather(const Node& node, const Context& /*context*/)
      : name_(to_string(node)), axis_(node.integer("axis", 0)) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& data = inputs[0].shape;
    const std::int64_t axis = wrap(name_, axis_, data.rank());
    outputs[0] = Shape(data.begin(), static_cast<std::size_t>(axis));
    for (std::int64_t dim : inputs[1].shape) outputs[0].append(dim);
    for (int i = static_cast<int>(axis) + 1; i < data.rank(); ++i) outputs[0].append(data[i]);
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const Shape& data = inputs[0].shape;
    const int axis = static_cast<int>(wrap(name_, axis_, data.rank()));
    const std::int64_t outer = Shape(data.begin(), static_cast<std::size_t>(axis)).elements();
    const std::int64_t inner =
        Shape(data.begin() + axis + 1, static_cast<std::size_t>(data.rank() - axis - 1)).elements();
    const auto bytes = static_cast<std::size_t>(inner) * size_of(inputs[0].type);
    const std::int64_t count = inputs[1].shape.elements();
    const auto* from = inputs[0].as<const std::byte>();
    auto* to = outputs[0].as<std::byte>();
    for (std::int64_t o = 0; o < outer; ++o) {
      for (std::int64_t i = 0; i < count; ++i, to += bytes) {
        const std::int64_t index = wrap(name_, integer_at(inputs[1], i), data[axis]);
        // The pointer may be null if there are no bytes, and memcpy must not get a null pointer.
        if (bytes > 0)
          std::memcpy(to, from + static_cast<std::size_t>(o * data[axis] + index) * bytes, bytes);
      }
    }
  }

 private:
  std::string name_;
  std::int64_t axis_;
};

class GatherND final : public Step {
 public:
  GatherND(const Node& node, const Context& /*context*/)
      : name_(to_string(node)), batch_dims_(static_cast<int>(node.integer("batch_dims", 0))) {}

  // Look-ups along axis 1: each slice answers the indices that fall into it. The last token's
  // hidden state is such a look-up.
  std::optional<Slicing> slicing(const Node& node) const override {
    const Value* indices = node.input(1);
    if (batch_dims_ != 1 || !indices->shape || (*indices->shape)[-1] != 1) return std::nullopt;
    return Slicing{.inputs = {0}, .outputs = {}};
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& data = inputs[0].shape;
    const Shape& indices = inputs[1].shape;
    const std::int64_t depth = indices.rank() == 0 ? 0 : indices[-1];
    if (indices.rank() <= batch_dims_ || depth < 1 || batch_dims_ + depth > data.rank()) {
      fail("[", name_, "] expected indices of 1 to ", data.rank() - batch_dims_,
           " coordinates, got ", to_string(indices), " for data of shape ", to_string(data));
    }
    for (int axis = 0; axis < batch_dims_; ++axis) {
      if (data[axis] != indices[axis]) {
        fail("[", name_, "] expected data and indices to share ", batch_dims_,
             " batch dimensions, got ", to_string(data), " and ", to_string(indices));
      }
    }
    outputs[0] = Shape(indices.begin(), static_cast<std::size_t>(indices.rank() - 1));
    for (int axis = batch_dims_ + static_cast<int>(depth); axis < data.rank(); ++axis)
      outputs[0].append(data[axis]);
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const Shape& data = inputs[0].shape;
    const Shape& indices = inputs[1].shape;
    const int depth = static_cast<int>(indices[-1]);
    const std::int64_t batches =
        Shape(data.begin(), static_cast<std::size_t>(batch_dims_)).elements();
    const std::int64_t lookups = indices.elements() / depth;
    const int first_inner = batch_dims_ + depth;
    if (outputs[0].shape.elements() == 0) return;  // ONNX Runtime does not look at the indices.
    const auto bytes =
        static_cast<std::size_t>(
            Shape(data.begin() + first_inner, static_cast<std::size_t>(data.rank() - first_inner))
                .elements()) *
        size_of(inputs[0].type);
    auto* to = outputs[0].as<std::byte>();
    const TokenSlice& slice = inputs[0].slice;
    for (std::int64_t i = 0; i < lookups; ++i, to += bytes) {
      std::int64_t offset = i / (lookups / batches);
      bool elsewhere = false;
      for (int c = 0; c < depth; ++c) {
        const std::int64_t size = data[batch_dims_ + c];
        const std::int64_t all = slice.tokens > 0 ? slice.tokens : size;
        const std::int64_t index =
            wrap(name_, integer_at(inputs[1], i * depth + c), all) - slice.first;
        elsewhere = elsewhere || index < 0 || index >= size;
        offset = offset * size + index;
      }
      if (elsewhere || bytes == 0) continue;
      std::memcpy(to, inputs[0].as<const std::byte>() + static_cast<std::size_t>(offset) * bytes,
                  bytes);
    }
  }

 private:
  std::string name_;
  int batch_dims_;
};

constexpr Port kData[] = {{.name = "data"}};
constexpr Port kShape[] = {{.name = "shape", .types = kInt64}};
constexpr AttributeRule kFromTo[] = {integer("start"), integer("end")};
constexpr Port kGather[] = {{.name = "data", .type_letter = 'T'},
                            {.name = "indices", .types = kIntegers}};
constexpr Port kGatherND[] = {{.name = "data", .type_letter = 'T'},
                              {.name = "indices", .types = kInt64, .shape = "[..,C]"}};
constexpr Port kOutput[] = {{.name = "output", .type_letter = 'T'}};
constexpr AttributeRule kAxis[] = {axis("axis")};
constexpr AttributeRule kBatch[] = {integer("batch_dims", 0, Shape::kMaxRank - 1)};

constexpr Operator kOperators[] = {
    {{"", "Shape", 1, 25, kData, kShape, kFromTo}, make<ShapeOf>},
    {{"", "Gather", 1, 13, kGather, kOutput, kAxis}, make<Gather>},
    {{"", "GatherND", 11, 13, kGatherND, kOutput, kBatch}, make<GatherND>},
};

}  // namespace

std::span<const Operator> shape_operators() { return kOperators; }

}  // namespace flownpu::cpu
