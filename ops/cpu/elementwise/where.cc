// SPDX-License-Identifier: Apache-2.0
// Operators that copy elements with broadcasting: Expand, and Where, which chooses between two
// tensors.
#include "ops/cpu/broadcast.h"
#include "ops/cpu/elements.h"
#include "ops/cpu/integers.h"
#include "ops/cpu/step.h"

namespace flownpu::cpu {
namespace {

class Where final : public Step {
 public:
  Where(const Node& node, const Context& context) : context_(context), name_(to_string(node)) {}

  std::optional<Slicing> slicing(const Node& node) const override { return slice_elements(node); }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    outputs[0] = broadcast_shapes(name_, inputs[0].shape,
                                  broadcast_shapes(name_, inputs[1].shape, inputs[2].shape));
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    with_bytes(outputs[0].type, [&]<typename T> { choose<T>(inputs, outputs[0]); });
  }

 private:
  template <typename T>
  void choose(std::span<const Tensor> inputs, const Tensor& output) const {
    const Broadcast<3> broadcast(output.shape,
                                 {&inputs[0].shape, &inputs[1].shape, &inputs[2].shape});
    with_step(broadcast.step(0), [&](auto step_c) {
      with_step(broadcast.step(1), [&](auto step_x) {
        with_step(broadcast.step(2), [&](auto step_y) {
          in_parallel(*context_.pool, output.shape.elements(), [&](auto begin, auto end) {
            broadcast.walk(begin, end, [&](auto first, auto count, const auto& offsets) {
              const auto* condition = inputs[0].as<const std::uint8_t>() + offsets[0];
              const T* x = inputs[1].as<const T>() + offsets[1];
              const T* y = inputs[2].as<const T>() + offsets[2];
              T* to = output.as<T>() + first;
              for (std::int64_t i = 0; i < count; ++i)
                to[i] = condition[i * step_c] != 0 ? x[i * step_x] : y[i * step_y];
            });
          });
        });
      });
    });
  }

  Context context_;
  std::string name_;
};

class Expand final : public Step {
 public:
  Expand(const Node& node, const Context& context) : context_(context), name_(to_string(node)) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    outputs[0] = broadcast_shapes(name_, inputs[0].shape, shape_in(name_, inputs[1]));
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    with_bytes(outputs[0].type, [&]<typename T> {
      const Broadcast<1> broadcast(outputs[0].shape, {&inputs[0].shape});
      in_parallel(*context_.pool, outputs[0].shape.elements(), [&](auto begin, auto end) {
        broadcast.walk(begin, end, [&](auto first, auto count, const auto& offsets) {
          const T* from = inputs[0].as<const T>() + offsets[0];
          T* to = outputs[0].as<T>() + first;
          if (broadcast.step(0) == 0) {
            std::fill_n(to, count, *from);
          } else {
            std::copy_n(from, count, to);
          }
        });
      });
    });
  }

 private:
  Context context_;
  std::string name_;
};

constexpr Port kWhere[] = {{.name = "condition", .types = kBool},
                           {.name = "X", .type_letter = 'T'},
                           {.name = "Y", .type_letter = 'T'}};
constexpr Port kExpand[] = {{.name = "input", .type_letter = 'T'},
                            {.name = "shape", .types = kInt64, .shape = "[R]"}};
constexpr Port kOutput[] = {{.name = "output", .type_letter = 'T'}};

constexpr Operator kOperators[] = {
    {{"", "Where", 9, 16, kWhere, kOutput}, make<Where>},
    {{"", "Expand", 8, 13, kExpand, kOutput}, make<Expand>},
};

}  // namespace

std::span<const Operator> where_operators() { return kOperators; }

}  // namespace flownpu::cpu
