// SPDX-License-Identifier: Apache-2.0
// Arithmetic of two tensors with numpy's broadcasting: floats, and the integers of positions and
// sizes, which wrap around where they overflow.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "ops/cpu/elements.h"
#include "ops/cpu/elementwise/binary.h"
#include "ops/cpu/widened.h"

namespace flownpu::cpu {
namespace {

// The type to compute in, unsigned for integers: signed integers may not overflow in C++.
template <typename T>
using Wrapping = typename std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>,
                                             std::type_identity<T>>::type;

struct Add {
  template <typename T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
  }
};
struct Sub {
  template <typename T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<Wrapping<T>>(a) - static_cast<Wrapping<T>>(b));
  }
};
struct Mul {
  template <typename T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
  }
};
// Quotients of integers are rounded towards zero. The lowest integer divided by -1, on which a
// processor traps, wraps around.
struct Div {
  template <typename T>
  T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) {
      if (b == T{-1}) return Sub()(T{0}, a);
    }
    return a / b;
  }
};
// The remainder has the divisor's sign; that of floats, the dividend's.
struct Mod {
  template <typename T>
  T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) {
      if (b == T{-1}) return 0;
      const T rest = a % b;
      return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
    } else {
      return std::fmod(a, b);
    }
  }
};
// NaN if either is.
struct Min {
  template <typename T>
  T operator()(T a, T b) const {
    return is_nan(a) ? a : a < b ? a : b;
  }
};
struct Max {
  template <typename T>
  T operator()(T a, T b) const {
    return is_nan(a) ? a : a > b ? a : b;
  }
};

template <typename Function>
class Arithmetic final : public Binary {
 public:
  using Binary::Binary;

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    with_number(outputs[0].type, [&]<typename T> {
      if constexpr (std::is_integral_v<T> &&
                    (std::is_same_v<Function, Div> || std::is_same_v<Function, Mod>))
        check<T>(inputs[1]);
      combine<T, T>(context(), inputs, outputs[0], Function());
    });
  }

 private:
  template <typename T>
  void check(const Tensor& divisor) const {
    const auto* begin = divisor.as<const T>();
    const auto* end = begin + divisor.shape.elements();
    if (std::find(begin, end, T{0}) != end) fail("[", name(), "] expected divisors other than 0");
  }
};

class Pow final : public Binary {
 public:
  using Binary::Binary;

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const auto combine_with = [&](const auto& function) {
      combine<float, float>(context(), inputs, outputs[0], function);
    };
    const bool is_one = inputs[1].shape.elements() == 1;
    const float exponent = is_one ? *inputs[1].as<const float>() : 0;
    if (exponent == 2) return combine_with([](float x, float) { return x * x; });
    if (exponent == 3) return combine_with([](float x, float) { return x * x * x; });
    // Unlike a root, the power of minus infinity is infinity, and that of -0 is 0.
    if (exponent == 0.5F)
      return combine_with([](float x, float) { return std::isinf(x) ? x * x : std::sqrt(x + 0); });
    combine_with([](float x, float y) { return std::pow(x, y); });
  }
};

constexpr Port kTwoNumbers[] = {{.name = "A", .types = kNumbersAndFloats, .type_letter = 'T'},
                                {.name = "B", .types = kNumbersAndFloats, .type_letter = 'T'}};
constexpr Port kNumber[] = {{.name = "C", .types = kNumbersAndFloats, .type_letter = 'T'}};
// The remainders of C are those of floats alone here, and of integers the others.
std::unique_ptr<Step> make_mod(const Node& node, const Context& context) {
  const bool is_float = node.inputs[0].type == DataType::kFloat32;
  if (is_float != (node.integer("fmod", 0) != 0))
    fail("[", to_string(node), "] expected fmod = ", is_float ? 1 : 0, " for this type");
  return std::make_unique<Arithmetic<Mod>>(node, context);
}

constexpr AttributeRule kMod[] = {flag("fmod")};
constexpr Port kTwoFloats[] = {{.name = "X", .types = kFloats, .type_letter = 'T'},
                               {.name = "Y", .types = kFloats}};
constexpr Port kOneFloat[] = {{.name = "Z", .types = kFloats, .type_letter = 'T'}};

// From version 7 on (Min, Max: 8) shapes broadcast as numpy's do.
constexpr Operator kOperators[] = {
    {{"", "Add", 7, 14, kTwoNumbers, kNumber}, widened<make<Arithmetic<Add>>>},
    {{"", "Sub", 7, 14, kTwoNumbers, kNumber}, widened<make<Arithmetic<Sub>>>},
    {{"", "Mul", 7, 14, kTwoNumbers, kNumber}, widened<make<Arithmetic<Mul>>>},
    {{"", "Div", 7, 14, kTwoNumbers, kNumber}, widened<make<Arithmetic<Div>>>},
    {{"", "Min", 8, 13, kTwoNumbers, kNumber}, widened<make<Arithmetic<Min>>>},
    {{"", "Max", 8, 13, kTwoNumbers, kNumber}, widened<make<Arithmetic<Max>>>},
    {{"", "Mod", 10, 13, kTwoNumbers, kNumber, kMod}, widened<make_mod>},
    {{"", "Pow", 7, 15, kTwoFloats, kOneFloat}, widened<make<Pow>>},
};

}  // namespace

std::span<const Operator> arithmetic_operators() { return kOperators; }

}  // namespace flownpu::cpu
