// SPDX-License-Identifier: Apache-2.0
// Gemm on the CPU: Y = alpha A B + beta C, with A and B transposed or not, and a C that broadcasts.
// If B is computed, not a weight, nothing is rounded.
#include <algorithm>
#include <span>
#include <string>

#include "ops/cpu/broadcast.h"
#include "ops/cpu/elements.h"
#include "ops/cpu/plane.h"
#include "ops/cpu/products/dense_matmul.h"
#include "ops/cpu/widened.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

class Gemm final : public Step {
 public:
  Gemm(const Node& node, const Context& context)
      : context_(context),
        name_(to_string(node)),
        product_(context),
        transposed_a_(node.integer("transA", 0) != 0),
        transposed_b_(node.integer("transB", 0) != 0),
        alpha_(node.number("alpha", 1)),
        beta_(node.number("beta", 1)) {
    const Value* b = node.input(1);
    if (!b->shape || (*b->shape)[0] < 0 || (*b->shape)[1] < 0) return;
    multiply_adds_ = b->shape->elements();
    if (b->constant == nullptr) return;
    const std::int64_t k = (*b->shape)[transposed_b_ ? 1 : 0];
    const std::int64_t m = (*b->shape)[transposed_b_ ? 0 : 1];
    product_.round_as_chosen(DataType::kFloat32, m);
    product_.keep(weight_of(b->constant, k, m));
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Sizes sizes = sizes_of(inputs);
    outputs[0] = {sizes.rows, sizes.m};
    const Shape* c = sizes.c == nullptr ? nullptr : &sizes.c->shape;
    if (c != nullptr && try_broadcast(*c, outputs[0]) != outputs[0])
      fail("[", name_, "] expected C of a shape that broadcasts to ", to_string(outputs[0]),
           ", got ", to_string(*c));
  }

  std::size_t scratch_bytes(std::span<const Tensor> inputs) const override {
    const Sizes sizes = sizes_of(inputs);
    Scratch scratch;
    if (transposed_a_) scratch.take<float>(sizes.rows * sizes.k);
    return scratch.bytes() + product_.scratch_bytes(sizes.rows, sizes.k, sizes.m);
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> memory) const override {
    const Sizes sizes = sizes_of(inputs);
    const auto* a = inputs[0].as<const float>();
    Scratch scratch(memory.data());
    if (transposed_a_) {
      auto* rows = scratch.take<float>(sizes.rows * sizes.k);
      transpose_a(a, rows, sizes);
      a = rows;
    }
    const DenseWeight weight = weight_of(inputs[1].data, sizes.k, sizes.m);
    ProductEpilogue epilogue;
    epilogue.y = outputs[0].as<float>();
    epilogue.m = sizes.m;
    const bool all = alpha_ == 1 && take_c(sizes, epilogue);
    product_.run(a, sizes.rows, weight, epilogue, memory.data() + scratch.bytes());
    if (!all) scale_and_add(sizes.c, outputs[0]);
  }

  std::int64_t multiply_adds() const override { return multiply_adds_; }

 private:
  struct Sizes {
    std::int64_t rows = 0;
    std::int64_t k = 0;
    std::int64_t m = 0;
    // Null if there is no C, or if beta is 0: as in BLAS, C's numbers then do not matter.
    const Tensor* c = nullptr;
  };

  DenseWeight weight_of(const void* values, std::int64_t k, std::int64_t m) const {
    return {values, DataType::kFloat32, k, m, transposed_b_, nullptr};
  }

  Sizes sizes_of(std::span<const Tensor> inputs) const {
    const Shape& a = inputs[0].shape;
    const Shape& b = inputs[1].shape;
    const std::int64_t k = a[transposed_a_ ? 0 : 1];
    if (b[transposed_b_ ? 1 : 0] != k)
      fail("[", name_, "] expected B with ", k, transposed_b_ ? " columns" : " rows",
           ", as many as A has to multiply, got A ", to_string(a), " and B ", to_string(b));
    const bool added = inputs.size() > 2 && inputs[2].present() && beta_ != 0;
    return {a[transposed_a_ ? 1 : 0], k, b[transposed_b_ ? 0 : 1], added ? &inputs[2] : nullptr};
  }

  // Lets the product's epilogue add C if C has a number for each column, or for each element.
  bool take_c(const Sizes& sizes, ProductEpilogue& epilogue) const {
    if (sizes.c == nullptr) return true;
    if (beta_ != 1) return false;
    const Shape& shape = sizes.c->shape;
    const auto* numbers = sizes.c->as<const float>();
    if (shape == Shape{sizes.rows, sizes.m}) {
      epilogue.residual = numbers;
    } else if (shape == Shape{sizes.m} || shape == Shape{1, sizes.m}) {
      epilogue.bias = numbers;
    } else {
      return false;
    }
    return true;
  }

  void transpose_a(const float* a, float* rows, const Sizes& sizes) const {
    context_.pool->run((sizes.rows + kTile - 1) / kTile, [&](std::int64_t tile) {
      const std::int64_t first = tile * kTile;
      transpose(a + first, sizes.rows, rows + first * sizes.k, sizes.k,
                std::min(kTile, sizes.rows - first), sizes.k);
    });
  }

  // y = alpha y + beta c.
  void scale_and_add(const Tensor* c, const Tensor& y) const {
    static constexpr float kNothing = 0;
    const Shape scalar;
    const Broadcast<1> broadcast(y.shape, {c == nullptr ? &scalar : &c->shape});
    const float* addends = c == nullptr ? &kNothing : c->as<const float>();
    const float beta = c == nullptr ? 0 : beta_;
    with_step(broadcast.step(0), [&](auto step) {
      in_parallel(*context_.pool, y.shape.elements(), [&](std::int64_t begin, std::int64_t end) {
        broadcast.walk(begin, end, [&](std::int64_t first, std::int64_t count, const auto& from) {
          float* sums = y.as<float>() + first;
          const float* addend = addends + from[0];
          for (std::int64_t i = 0; i < count; ++i)
            sums[i] = alpha_ * sums[i] + beta * addend[i * step];
        });
      });
    });
  }

  Context context_;
  std::string name_;
  DenseProduct product_;
  bool transposed_a_;
  bool transposed_b_;
  float alpha_;
  float beta_;
  std::int64_t multiply_adds_ = 0;
};

constexpr Port kInputs[] = {{.name = "A", .types = kFloats, .shape = "[?,?]", .type_letter = 'T'},
                            {.name = "B", .types = kFloats, .shape = "[?,?]", .type_letter = 'T'},
                            optional({.name = "C", .types = kFloats, .type_letter = 'T'})};
constexpr Port kOutputs[] = {{.name = "Y", .types = kFloats, .type_letter = 'T'}};
constexpr AttributeRule kAttributes[] = {flag("transA"), flag("transB"), number("alpha"),
                                         number("beta")};
constexpr Operator kOperators[] = {
    {{"", "Gemm", 7, 13, kInputs, kOutputs, kAttributes}, widened<make<Gemm>>}};

}  // namespace

std::span<const Operator> gemm_operators() { return kOperators; }

}  // namespace flownpu::cpu
