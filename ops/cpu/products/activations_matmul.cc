// SPDX-License-Identifier: Apache-2.0
// MatMul of two activations, as in the attention of graphs that were not folded; in f32, nothing
// rounded.
#include <algorithm>

#include "ops/cpu/broadcast.h"
#include "ops/cpu/products/dense_matmul.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

// A [.., S, K] times B [.., K, M], whose leading axes broadcast.
class ActivationsMatMul final : public Step {
 public:
  ActivationsMatMul(const Node& node, const Context& context)
      : name_(to_string(node)), product_(context, DenseRounding::kFloat) {
    for (const std::size_t i : {0, 1}) {
      const Value* value = node.input(i);
      if (value->shape && value->shape->rank() < 2)
        fail("[", name_, "] expected operands of two axes or more, got ", to_string(*value->shape));
    }
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& a = inputs[0].shape;
    const Shape& b = inputs[1].shape;
    if (a.rank() < 2 || b.rank() < 2)
      unsupported("[", name_, "] expected operands of two axes or more, got ", to_string(a),
                  " and ", to_string(b));
    if (a[-1] != b[-2])
      fail("[", name_, "] expected shapes [.., S, K] and [.., K, M], got ", to_string(a), " and ",
           to_string(b));
    const std::optional<Shape> batches = try_broadcast(leading(a), leading(b));
    // ONNX Runtime takes other shapes, too, if they have no elements.
    if (!batches)
      unsupported("[", name_, "] expected shapes that broadcast, got ", to_string(a), " and ",
                  to_string(b));
    outputs[0] = *batches;
    outputs[0].append(a[-2]);
    outputs[0].append(b[-1]);
  }

  std::size_t scratch_bytes(std::span<const Tensor> inputs) const override {
    const Shape& a = inputs[0].shape;
    return product_.scratch_bytes(a[-2], a[-1], inputs[1].shape[-1]);
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> scratch) const override {
    const Shape& a = inputs[0].shape;
    const Shape& b = inputs[1].shape;
    const std::int64_t rows = a[-2];
    const std::int64_t k = a[-1];
    const std::int64_t m = b[-1];
    const Shape leading_a = leading(a);
    const Shape leading_b = leading(b);
    const Shape batches = leading(outputs[0].shape);
    const Broadcast<2> broadcast(batches, {&leading_a, &leading_b});
    broadcast.walk(
        0, batches.elements(), [&](std::int64_t first, std::int64_t count, const auto& offsets) {
          for (std::int64_t i = 0; i < count; ++i) {
            const DenseWeight weight{
                inputs[1].as<const float>() + (offsets[1] + i * broadcast.step(1)) * k * m,
                DataType::kFloat32,
                k,
                m,
                false,
                nullptr};
            ProductEpilogue epilogue;
            epilogue.y = outputs[0].as<float>() + (first + i) * rows * m;
            epilogue.m = m;
            product_.run(
                inputs[0].as<const float>() + (offsets[0] + i * broadcast.step(0)) * rows * k, rows,
                weight, epilogue, scratch.data());
          }
        });
  }

 private:
  static Shape leading(const Shape& shape) {
    return Shape(shape.begin(), static_cast<std::size_t>(shape.rank() - 2));
  }

  std::string name_;
  DenseProduct product_;
};

}  // namespace

std::unique_ptr<Step> make_activations_matmul(const Node& node, const Context& context) {
  return std::make_unique<ActivationsMatMul>(node, context);
}

}  // namespace flownpu::cpu
