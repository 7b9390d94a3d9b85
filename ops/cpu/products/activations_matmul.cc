// SPDX-License-Identifier: Apache-2.0
// MatMul of two activations, such as the attention of graphs that were not folded. It computes in
// f32 and rounds nothing.
#include <algorithm>
#include <memory>

#include "ops/cpu/broadcast.h"
#include "ops/cpu/products/dense_matmul.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

// A [.., S, K] times B [.., K, M], whose leading axes broadcast. A vector A is one row, a vector B
// one column, whose axis the product does not have.
class ActivationsMatMul final : public Step {
 public:
  ActivationsMatMul(const Node& node, const Context& context)
      : pool_(context.pool), name_(to_string(node)), product_(context) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape a = rows_of(inputs[0]);
    const Shape b = columns_of(inputs[1]);
    if (a[-1] != b[-2])
      fail("[", name_, "] expected shapes [.., S, K] and [.., K, M], got ", to_string(a), " and ",
           to_string(b));
    const std::optional<Shape> batches = try_broadcast(leading(a), leading(b));
    // ONNX Runtime takes other shapes, too, if they have no elements.
    if (!batches)
      unsupported("[", name_, "] expected shapes that broadcast, got ", to_string(a), " and ",
                  to_string(b));
    outputs[0] = *batches;
    if (inputs[0].shape.rank() > 1) outputs[0].append(a[-2]);
    if (inputs[1].shape.rank() > 1) outputs[0].append(b[-1]);
  }

  std::size_t scratch_bytes(std::span<const Tensor> inputs) const override {
    const Shape a = rows_of(inputs[0]);
    const Shape b = columns_of(inputs[1]);
    const std::int64_t batches = try_broadcast(leading(a), leading(b)).value_or(Shape()).elements();
    return product_bytes(a, b) * static_cast<std::size_t>(is_batched(batches) ? threads() : 1);
  }

  // Each thread multiplies batches of its own, or if they are few, all threads each batch.
  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> scratch) const override {
    const Shape a = rows_of(inputs[0]);
    const Shape b = columns_of(inputs[1]);
    const std::int64_t rows = a[-2];
    const std::int64_t k = a[-1];
    const std::int64_t m = b[-1];
    const Shape leading_a = leading(a);
    const Shape leading_b = leading(b);
    const Shape shape = try_broadcast(leading_a, leading_b).value_or(Shape());
    const Broadcast<2> broadcast(shape, {&leading_a, &leading_b});
    const auto multiply = [&](std::int64_t begin, std::int64_t end, std::byte* memory) {
      broadcast.walk(begin, end, [&](std::int64_t first, std::int64_t count, const auto& offsets) {
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
              weight, epilogue, memory);
        }
      });
    };
    const std::int64_t batches = shape.elements();
    if (!is_batched(batches)) return multiply(0, batches, scratch.data());
    const std::size_t bytes = product_bytes(a, b);
    pool_->run(batches, [&](std::int64_t batch, std::size_t thread) {
      multiply(batch, batch + 1, scratch.data() + thread * bytes);
    });
  }

 private:
  static Shape rows_of(const Tensor& a) {
    return a.shape.rank() > 1 ? a.shape : Shape{1, a.shape[0]};
  }
  static Shape columns_of(const Tensor& b) {
    return b.shape.rank() > 1 ? b.shape : Shape{b.shape[0], 1};
  }
  static Shape leading(const Shape& shape) {
    return Shape(shape.begin(), static_cast<std::size_t>(shape.rank() - 2));
  }

  std::int64_t threads() const { return pool_->threads(); }
  bool is_batched(std::int64_t batches) const { return threads() > 1 && batches >= threads(); }
  std::size_t product_bytes(const Shape& a, const Shape& b) const {
    return product_.scratch_bytes(a[-2], a[-1], b[-1]);
  }

  std::shared_ptr<ThreadPool> pool_;
  std::string name_;
  DenseProduct product_;
};

}  // namespace

std::unique_ptr<Step> make_activations_matmul(const Node& node, const Context& context) {
  return std::make_unique<ActivationsMatMul>(node, context);
}

}  // namespace flownpu::cpu
