// SPDX-License-Identifier: Apache-2.0
// Cast between all types that devices know. Results that are floats are rounded to nearest even;
// floats become integers by rounding towards zero. A float that the integer type does not hold
// becomes the type's lowest number, as on x86; ONNX leaves this open. Integers that are too long
// lose their upper bits.
#include <limits>
#include <type_traits>

#include "ops/cpu/broadcast.h"
#include "ops/cpu/elements.h"
#include "ops/cpu/step.h"
#include "ops/formats/numbers.h"

namespace flownpu::cpu {
namespace {

// The 16-bit formats, as types that differ from integers of that size.
struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

float to_number(Half x) { return from_half(x.bits); }
float to_number(BFloat16 x) { return from_bfloat16(x.bits); }
template <typename From>
From to_number(From x) {
  return x;
}

template <typename To>
To to_integer(float x) {
  // Both ends are powers of two, exact in float; NaN is in no range.
  constexpr auto kLowest = static_cast<float>(std::numeric_limits<To>::lowest());
  constexpr To kHalf = std::numeric_limits<To>::max() / 2 + 1;
  constexpr float kEnd = static_cast<float>(kHalf) * 2;
  return x > kLowest - 1 && x < kEnd ? static_cast<To>(x) : std::numeric_limits<To>::lowest();
}

template <typename To, typename From>
To convert(From from) {
  const auto x = to_number(from);
  if constexpr (std::is_same_v<To, bool>) {
    return x != 0;
  } else if constexpr (std::is_same_v<To, Half>) {
    return {to_half(static_cast<float>(x))};
  } else if constexpr (std::is_same_v<To, BFloat16>) {
    return {to_bfloat16(static_cast<float>(x))};
  } else if constexpr (std::is_integral_v<To> && std::is_floating_point_v<decltype(x)>) {
    return to_integer<To>(x);
  } else {
    return static_cast<To>(x);
  }
}

template <typename Work>
void with_type(DataType type, const Work& work) {
  switch (type) {
    case DataType::kFloat32:
      return work.template operator()<float>();
    case DataType::kFloat16:
      return work.template operator()<Half>();
    case DataType::kBFloat16:
      return work.template operator()<BFloat16>();
    case DataType::kInt64:
      return work.template operator()<std::int64_t>();
    case DataType::kInt32:
      return work.template operator()<std::int32_t>();
    case DataType::kInt8:
      return work.template operator()<std::int8_t>();
    case DataType::kUInt8:
      return work.template operator()<std::uint8_t>();
    case DataType::kBool:
      return work.template operator()<bool>();
    default:
      fail("expected a type whose elements have addresses, got ", name_of(type));
  }
}

class Cast final : public Step {
 public:
  Cast(const Node& /*node*/, const Context& context) : context_(context) {}

  std::optional<Slicing> slicing(const Node& node) const override { return slice_elements(node); }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    outputs[0] = inputs[0].shape;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const Tensor& x = inputs[0];
    const Tensor& y = outputs[0];
    in_parallel(*context_.pool, x.shape.elements(), [&](auto begin, auto end) {
      if (x.type == DataType::kFloat32 && size_of(y.type) == sizeof(std::uint16_t)) {
        // The kernels round many at once.
        context_.kernels.store_cache(x.as<const float>() + begin, y.as<std::uint16_t>() + begin,
                                     y.type, end - begin);
        return;
      }
      if (y.type == DataType::kFloat32 && size_of(x.type) == sizeof(std::uint16_t)) {
        context_.kernels.widen(x.as<const std::uint16_t>() + begin, x.type, y.as<float>() + begin,
                               end - begin);
        return;
      }
      if (y.type == DataType::kFloat32 && size_of(x.type) == 1) {
        context_.kernels.dequantize(x.as<const std::byte>() + begin, end - begin, 1, 0,
                                    x.type == DataType::kInt8, y.as<float>() + begin);
        return;
      }
      with_type(x.type, [&]<typename From> {
        with_type(y.type, [&]<typename To> {
          const auto* from = x.as<const From>();
          auto* to = y.as<To>();
          for (std::int64_t i = begin; i < end; ++i) to[i] = convert<To>(from[i]);
        });
      });
    });
  }

 private:
  Context context_;
};

constexpr Port kInput[] = {{.name = "input"}};
constexpr Port kOutput[] = {{.name = "output"}};
// `to` is the output's type; the others are about 8-bit floats, which this device does not have.
constexpr AttributeRule kAttributes[] = {integer("to", 1, 16), flag("saturate"),
                                         text("round_mode", "up|down|nearest")};

// The output has the second input's type.
constexpr Port kLike[] = {{.name = "input"}, {.name = "target_type", .type_letter = 'T'}};
constexpr Port kLikeOutput[] = {{.name = "output", .type_letter = 'T'}};
constexpr AttributeRule kLikeAttributes[] = {flag("saturate"),
                                             text("round_mode", "up|down|nearest")};

constexpr Operator kOperators[] = {
    {{"", "Cast", 6, 25, kInput, kOutput, kAttributes}, make<Cast>},
    {{"", "CastLike", 15, 25, kLike, kLikeOutput, kLikeAttributes}, make<Cast>},
};

}  // namespace

std::span<const Operator> cast_operators() { return kOperators; }

}  // namespace flownpu::cpu
