// SPDX-License-Identifier: Apache-2.0
// DenseMatMul on the CPU, and MatMul with a constant weight, which is the same without an epilogue.
#include "ops/cpu/products/dense_matmul.h"

#include <algorithm>
#include <string>

#include "ops/cpu/broadcast.h"
#include "ops/cpu/widened.h"
#include "ops/error.h"
#include "ops/nodes/dense_matmul.h"

namespace flownpu::cpu {

namespace {

// The indices of a product's operands among a node's inputs; kAbsent: it has none.
constexpr std::size_t kAbsent = 99;
struct Operands {
  std::size_t scale = kAbsent;
  std::size_t bias = kAbsent;
  std::size_t residual = kAbsent;
  bool transposed = false;
  Function activation = Function::kNone;
};

class DenseMatMul final : public Step {
 public:
  DenseMatMul(const Node& node, const Context& context, const Operands& operands)
      : context_(context), name_(to_string(node)), operands_(operands), product_(context) {
    const Value* weight = node.input(1);
    if (weight == nullptr || !weight->shape || weight->shape->rank() != 2 ||
        weight->shape->elements() < 0 || (*weight->shape)[0] < 0) {
      fail("[", name_, "] expected W of two axes whose lengths are known, got ",
           weight != nullptr && weight->shape ? to_string(*weight->shape) : "an unknown shape");
    }
    type_ = weight->type;
    k_ = (*weight->shape)[operands.transposed ? 1 : 0];
    m_ = (*weight->shape)[operands.transposed ? 0 : 1];
    product_.round_as_chosen(type_, m_);
    check_columns(node, operands.scale, "scale");
    check_columns(node, operands.bias, "bias");
    if (weight->constant != nullptr) keep(node, weight->constant);
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    outputs[0] = product_shape(inputs[0].shape);
    if (const Tensor* residual = find(inputs, operands_.residual); residual != nullptr)
      outputs[0] = broadcast_shapes(name_, outputs[0], residual->shape);
  }

  std::size_t scratch_bytes(std::span<const Tensor> inputs) const override {
    Scratch scratch;
    take_product(scratch, inputs);
    return scratch.bytes() + product_.scratch_bytes(rows_of(inputs[0]), k_, m_);
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> memory) const override {
    Scratch scratch(memory.data());
    float* product = take_product(scratch, inputs);
    const DenseWeight weight = weight_of(inputs[1].data, data(inputs, operands_.scale));
    ProductEpilogue epilogue{data(inputs, operands_.bias), operands_.activation, nullptr,
                             outputs[0].as<float>(), m_};
    if (product == nullptr) {
      epilogue.residual = data(inputs, operands_.residual);
    } else {
      epilogue.y = product;
    }
    product_.run(inputs[0].as<const float>(), rows_of(inputs[0]), weight, epilogue,
                 memory.data() + scratch.bytes());
    if (product == nullptr) return;
    add(product, product_shape(inputs[0].shape), inputs[operands_.residual], outputs[0]);
  }

  std::optional<Slicing> slicing(const Node& node) const override {
    const Value* residual = node.input(operands_.residual);
    if (residual == nullptr) return slice_rows(node, {0}, 1);
    if (residual->constant != nullptr) return std::nullopt;
    return slice_rows(node, {0, operands_.residual}, 1);
  }

  std::int64_t multiply_adds() const override { return m_ * k_; }

 private:
  void keep(const Node& node, const void* constant) {
    const Value* scale = node.input(operands_.scale);
    if (scale != nullptr && scale->constant == nullptr) return;
    product_.keep(weight_of(constant, scale == nullptr ? nullptr : scale->constant));
  }

  DenseWeight weight_of(const void* values, const void* scales) const {
    return {values, type_, k_, m_, operands_.transposed, static_cast<const float*>(scales)};
  }

  static const Tensor* find(std::span<const Tensor> inputs, std::size_t index) {
    return index < inputs.size() && inputs[index].present() ? &inputs[index] : nullptr;
  }
  static const float* data(std::span<const Tensor> inputs, std::size_t index) {
    const Tensor* tensor = find(inputs, index);
    return tensor == nullptr ? nullptr : tensor->as<const float>();
  }

  void check_columns(const Node& node, std::size_t input, std::string_view what) const {
    const Value* value = node.input(input);
    if (value == nullptr) return;
    if (!value->shape || value->shape->elements() != m_ || (*value->shape)[-1] != m_) {
      fail("[", name_, "] expected ", what, " of ", m_, " elements, got ",
           value->shape ? to_string(*value->shape) : "an unknown shape");
    }
  }

  // X may have rows of no elements.
  static std::int64_t rows_of(const Tensor& x) {
    return Shape(x.shape.begin(), static_cast<std::size_t>(x.shape.rank() - 1)).elements();
  }

  Shape product_shape(const Shape& x) const {
    if (x.rank() == 0 || x[-1] != k_)
      fail("[", name_, "] expected X of shape [.., ", k_, "], got ", to_string(x));
    Shape shape = x;
    shape[-1] = m_;
    return shape;
  }

  // Memory for the product, where a residual of another shape is added afterwards; null if the
  // epilogue adds it.
  float* take_product(Scratch& scratch, std::span<const Tensor> inputs) const {
    const Tensor* residual = find(inputs, operands_.residual);
    const Shape shape = product_shape(inputs[0].shape);
    if (residual == nullptr || residual->shape == shape) return nullptr;
    return scratch.take<float>(shape.elements());
  }

  // y = product + residual, where one of them is broadcast.
  void add(const float* product, const Shape& shape, const Tensor& residual,
           const Tensor& y) const {
    const Broadcast<2> broadcast(y.shape, {&shape, &residual.shape});
    const int steps[] = {broadcast.step(0), broadcast.step(1)};
    in_parallel(*context_.pool, y.shape.elements(), [&](std::int64_t begin, std::int64_t end) {
      broadcast.walk(begin, end, [&](std::int64_t first, std::int64_t count, const auto& offsets) {
        const float* a = product + offsets[0];
        const float* b = residual.as<const float>() + offsets[1];
        for (std::int64_t i = 0; i < count; ++i)
          y.as<float>()[first + i] = a[i * steps[0]] + b[i * steps[1]];
      });
    });
  }

  Context context_;
  std::string name_;
  Operands operands_;
  DenseProduct product_;
  DataType type_ = DataType::kFloat32;
  std::int64_t k_ = 0;
  std::int64_t m_ = 0;
};

Function activation_of(const Node& node) {
  const std::string text = node.text("activation", "none");
  return text == "gelu"        ? Function::kGelu
         : text == "gelu_tanh" ? Function::kGeluTanh
                               : Function::kNone;
}

std::unique_ptr<Step> make_matmul(const Node& node, const Context& context) {
  const Value* b = node.input(1);
  if (b == nullptr || b->constant == nullptr || !b->shape || b->shape->rank() != 2)
    return make_activations_matmul(node, context);
  return std::make_unique<DenseMatMul>(node, context, Operands{});
}

constexpr Port kMatMul[] = {{.name = "A", .types = kFloats, .shape = "[..,?]", .type_letter = 'T'},
                            {.name = "B", .types = kFloats, .shape = "[..,?]", .type_letter = 'T'}};
constexpr Port kMatMulResult[] = {{.name = "Y", .types = kFloats, .type_letter = 'T'}};

constexpr Operator kOperators[] = {
    {kDenseMatMul, make_dense_matmul},
    {{"", "MatMul", 1, 13, kMatMul, kMatMulResult}, widened<make_matmul, kDenseWeight>},
};

}  // namespace

std::unique_ptr<Step> make_dense_matmul(const Node& node, const Context& context) {
  return std::make_unique<DenseMatMul>(node, context,
                                       Operands{.scale = kDenseScale,
                                                .bias = kDenseBias,
                                                .residual = kDenseResidual,
                                                .transposed = node.integer("transposed", 0) != 0,
                                                .activation = activation_of(node)});
}

std::span<const Operator> dense_operators() { return kOperators; }

}  // namespace flownpu::cpu
