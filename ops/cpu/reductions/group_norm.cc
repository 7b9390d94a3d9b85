// SPDX-License-Identifier: Apache-2.0
// Norms of images, over the pixels of each group of channels: GroupNormalization, ONNX Runtime's
// GroupNorm with SiLU behind it, and InstanceNormalization, whose groups are single channels.
#include <string>

#include "ops/cpu/integers.h"
#include "ops/cpu/rows.h"
#include "ops/cpu/step.h"
#include "ops/cpu/widened.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

class GroupNorm final : public Step {
 public:
  GroupNorm(const Node& node, const Context& context)
      : context_(context),
        name_(to_string(node)),
        epsilon_(node.number("epsilon", 1e-5F)),
        groups_(node.integer("num_groups", node.integer("groups", kChannels))),
        is_silu_(node.integer("activation", 0) != 0) {
    const Value* x = node.input(0);
    if (x->shape) check(*x->shape);
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& x = inputs[0].shape;
    check(x);
    for (const std::size_t weight : {1, 2}) {
      if (inputs[weight].shape.elements() != x[1])
        fail("[", name_, "] expected a number for each of ", x[1], " channels, got ",
             to_string(inputs[weight].shape));
    }
    outputs[0] = x;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const Shape& x = inputs[0].shape;
    if (x.elements() == 0) return;
    const std::int64_t pixels = elements_of(x, 2, x.rank());
    const std::int64_t groups = groups_ == kChannels ? x[1] : groups_;
    const std::int64_t channels = x[1] / groups;
    context_.pool->run(x[0] * groups, [&](std::int64_t task) {
      const std::int64_t at = task * channels * pixels;
      const std::int64_t channel = task % groups * channels;
      context_.kernels.group_norm(inputs[0].as<const float>() + at,
                                  inputs[1].as<const float>() + channel,
                                  inputs[2].as<const float>() + channel, epsilon_, is_silu_,
                                  outputs[0].as<float>() + at, channels, pixels);
    });
  }

 private:
  // As many groups as channels.
  static constexpr std::int64_t kChannels = 0;

  void check(const Shape& x) const {
    if (x.rank() < 2 || (groups_ != kChannels && x[1] >= 0 && x[1] % groups_ != 0))
      fail("[", name_, "] expected images [N, C, ..] whose channels make ", groups_,
           " groups, got ", to_string(x));
  }

  Context context_;
  std::string name_;
  float epsilon_;
  std::int64_t groups_;
  bool is_silu_;
};

constexpr Port kOnnxInputs[] = {
    {.name = "X", .types = kFloats, .type_letter = 'T'},
    {.name = "scale", .types = kFloats, .shape = "[C]", .type_letter = 'T'},
    {.name = "bias", .types = kFloats, .shape = "[C]", .type_letter = 'T'}};
constexpr Port kInstanceInputs[] = {
    {.name = "input", .types = kFloats, .type_letter = 'T'},
    {.name = "scale", .types = kFloats, .shape = "[C]", .type_letter = 'T'},
    {.name = "B", .types = kFloats, .shape = "[C]", .type_letter = 'T'}};
constexpr Types kGroupTypes{DataType::kFloat32, DataType::kFloat16};
constexpr Port kGroupInputs[] = {{.name = "X", .types = kGroupTypes, .type_letter = 'T'},
                                 {.name = "gamma", .types = kGroupTypes},
                                 {.name = "beta", .types = kGroupTypes}};
constexpr Port kGroupY[] = {{.name = "Y", .types = kGroupTypes, .type_letter = 'T'}};
constexpr Port kY[] = {{.name = "Y", .types = kFloats, .type_letter = 'T'}};
constexpr Port kInstanceOutput[] = {{.name = "output", .types = kFloats, .type_letter = 'T'}};
constexpr AttributeRule kOnnxAttributes[] = {number("epsilon"), required(count("num_groups", 1)),
                                             only("stash_type", 1)};
constexpr AttributeRule kInstanceAttributes[] = {number("epsilon")};
constexpr AttributeRule kGroupAttributes[] = {required(flag("activation")),
                                              required(only("channels_last", 0)), number("epsilon"),
                                              required(count("groups", 1))};

constexpr Operator kOperators[] = {
    {{"", "GroupNormalization", 21, 21, kOnnxInputs, kY, kOnnxAttributes},
     widened<make<GroupNorm>>},
    {{"com.microsoft", "GroupNorm", 1, 1, kGroupInputs, kGroupY, kGroupAttributes},
     widened<make<GroupNorm>>},
    {{"", "InstanceNormalization", 6, 22, kInstanceInputs, kInstanceOutput, kInstanceAttributes},
     widened<make<GroupNorm>>},
};

}  // namespace

std::span<const Operator> group_norm_operators() { return kOperators; }

}  // namespace flownpu::cpu
