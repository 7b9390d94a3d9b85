// SPDX-License-Identifier: Apache-2.0
// Activations of one vector.
#pragma once

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/vector.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// GELU with the tanh of Hendrycks and Gimpel: x / 2 (1 + tanh u), u = sqrt(2 / pi) (x + 0.044715
// x^3), which is x / (1 + e^(-2 u)): (1 + tanh u) / 2 is the logistic function of 2 u.
inline Vector gelu_tanh(Vector x) {
  constexpr float kMinusTwoSqrtTwoOverPi = -1.59576912F;
  return x / (1.0F + exp(kMinusTwoSqrtTwoOverPi * (x + 0.044715F * x * x * x)));
}

// erf x = sign(x) (1 - (a1 t + .. + a5 t^5) e^(-x^2)), t = 1 / (1 + p |x|): Abramowitz and Stegun,
// Handbook of Mathematical Functions, 7.1.26, whose error is at most 1.5e-7.
inline Vector erf(Vector x) {
  const Vector magnitude = max(x, -x);
  const Vector t = 1.0F / (1.0F + 0.3275911F * magnitude);
  Vector y = 1.061405429F * t - 1.453152027F;
  y = y * t + 1.421413741F;
  y = y * t - 0.284496736F;
  y = y * t + 0.254829592F;
  y = 1.0F - y * t * exp(-magnitude * magnitude);
  return select(x < Vector{}, -y, y);
}

// GELU: x / 2 (1 + erf(x / sqrt 2)).
inline Vector gelu(Vector x) {
  constexpr float kSqrtHalf = 0.707106781F;
  return 0.5F * x * (1.0F + erf(x * kSqrtHalf));
}

template <Activation ACTIVATION>
inline Vector activate(Vector x) {
  if constexpr (ACTIVATION == Activation::kGelu) return gelu(x);
  if constexpr (ACTIVATION == Activation::kGeluTanh) return gelu_tanh(x);
  return x;
}

// Calls function.template operator()<ACTIVATION>().
template <typename Function>
void with_activation(Activation activation, const Function& function) {
  switch (activation) {
    case Activation::kGelu:
      return function.template operator()<Activation::kGelu>();
    case Activation::kGeluTanh:
      return function.template operator()<Activation::kGeluTanh>();
    default:
      return function.template operator()<Activation::kNone>();
  }
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
