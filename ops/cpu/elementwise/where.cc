// SPDX-License-Identifier: Apache-2.0
// Operators that copy elements with broadcasting: Where, which chooses between two tensors, Expand
// and Tile.
#include "ops/cpu/broadcast.h"
#include "ops/cpu/elements.h"
#include "ops/cpu/integers.h"
#include "ops/cpu/step.h"

namespace flownpu::cpu {
namespace {

// to[i] = from[i STEP] for i < count; STEP 0 or 1.
template <int STEP, typename T>
void repeat(const T* from, T* to, std::int64_t count) {
  if constexpr (STEP == 0) {
    std::fill_n(to, count, *from);
  } else {
    std::copy_n(from, count, to);
  }
}

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
    in_parallel(*context_.pool, output.shape.elements(), [&](auto begin, auto end) {
      broadcast.walk(begin, end, [&](auto first, auto count, const auto& offsets) {
        const auto* condition = inputs[0].as<const std::uint8_t>() + offsets[0];
        const T* x = inputs[1].as<const T>() + offsets[1];
        const T* y = inputs[2].as<const T>() + offsets[2];
        T* to = output.as<T>() + first;
        if (broadcast.step(0) == 0) {
          const int chosen = *condition != 0 ? 1 : 2;
          with_step(broadcast.step(chosen),
                    [&](auto step) { repeat<step>(chosen == 1 ? x : y, to, count); });
          return;
        }
        with_step(broadcast.step(1), [&](auto step_x) {
          with_step(broadcast.step(2), [&](auto step_y) {
            for (std::int64_t i = 0; i < count; ++i)
              to[i] = condition[i] != 0 ? x[i * step_x] : y[i * step_y];
          });
        });
      });
    });
  }

  Context context_;
  std::string name_;
};

// Copies x to y with numpy's broadcasting.
void copy_broadcast(ThreadPool& pool, const Tensor& x, const Shape& from, const Tensor& y,
                    const Shape& to) {
  with_bytes(y.type, [&]<typename T> {
    const Broadcast<1> broadcast(to, {&from});
    in_parallel(pool, to.elements(), [&](auto begin, auto end) {
      broadcast.walk(begin, end, [&](auto first, auto count, const auto& offsets) {
        const T* source = x.as<const T>() + offsets[0];
        T* target = y.as<T>() + first;
        with_step(broadcast.step(0), [&](auto step) { repeat<step>(source, target, count); });
      });
    });
  });
}

class Expand final : public Step {
 public:
  Expand(const Node& node, const Context& context) : context_(context), name_(to_string(node)) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    outputs[0] = broadcast_shapes(name_, inputs[0].shape, shape_in(name_, inputs[1]));
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    copy_broadcast(*context_.pool, inputs[0], inputs[0].shape, outputs[0], outputs[0].shape);
  }

 private:
  Context context_;
  std::string name_;
};

// Each axis [d], repeated r times, is [1, d] broadcast to [r, d]: so of at most half of the axes
// that a shape can have.
class Tile final : public Step {
 public:
  Tile(const Node& node, const Context& context) : context_(context), name_(to_string(node)) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape repeats = shape_in(name_, inputs[1]);
    outputs[0] = inputs[0].shape;
    if (repeats.rank() != outputs[0].rank())
      fail("[", name_, "] expected a number of repeats for each of ", outputs[0].rank(),
           " axes, got ", repeats.rank());
    if (repeats.rank() > Shape::kMaxRank / 2)
      unsupported("[", name_, "] expected at most ", Shape::kMaxRank / 2, " axes, got ",
                  repeats.rank());
    for (int axis = 0; axis < repeats.rank(); ++axis) {
      std::int64_t& size = outputs[0][axis];
      if (__builtin_mul_overflow(size, repeats[axis], &size))
        fail("[", name_, "] expected repeats of which a tensor fits in memory, got ", repeats[axis],
             " for axis ", axis);
    }
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    Shape from;
    Shape to;
    for (int axis = 0; axis < inputs[0].shape.rank(); ++axis) {
      const std::int64_t size = inputs[0].shape[axis];
      from.append(1);
      from.append(size);
      to.append(integer_at(inputs[1], axis));
      to.append(size);
    }
    copy_broadcast(*context_.pool, inputs[0], from, outputs[0], to);
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
constexpr Port kTile[] = {{.name = "input", .type_letter = 'T'},
                          {.name = "repeats", .types = kInt64, .shape = "[R]"}};
constexpr Port kOutput[] = {{.name = "output", .type_letter = 'T'}};

constexpr Operator kOperators[] = {
    {{"", "Where", 9, 16, kWhere, kOutput}, make<Where>},
    {{"", "Expand", 8, 13, kExpand, kOutput}, make<Expand>},
    {{"", "Tile", 6, 13, kTile, kOutput}, make<Tile>},
};

}  // namespace

std::span<const Operator> where_operators() { return kOperators; }

}  // namespace flownpu::cpu
