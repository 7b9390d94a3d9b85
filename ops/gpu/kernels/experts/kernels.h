// SPDX-License-Identifier: Apache-2.0
// Kernels of a mixture of experts around its products (ExpertsShape): the choice of experts for
// each row, the order of choices in which rows of one expert follow one another, and the sum of
// answers. Choice c is that of row c / per_row. Tensors without a type are float32.
#pragma once

#include <cstdint>

#include "ops/gpu/context/context.h"
#include "ops/gpu/language/kernel.h"

namespace flownpu::gpu {

// The most experts, whose logits fit a work-group's memory three times.
inline constexpr std::int64_t kMostExpertsOfRow = 1024;

struct RouterShape {
  std::int64_t experts = 0;
  std::int64_t per_row = 0;
  std::int64_t hidden = 0;
  Element weight = Element::kFloat32;  // of the router; or float16, bfloat16
  bool has_logits_bias = false;
  // Whether the softmax is over the chosen experts' logits, or over all.
  bool normalizes = true;
  // Experts are ranked by sigmoid(logit) + bias; the sigmoids over their sum are the shares.
  bool has_bias = false;
  bool has_scales = false;
};

// logits = x . router^T + bias. Arguments: x [t, hidden] of the type of activations, router
// [experts, hidden], logits [t, experts], then bias [experts] if there is one.
KernelDescription router_logits(const RouterShape& shape);
Grid router_logits_grid(const RouterShape& shape, std::int64_t rows);

// The experts with the largest logits, of equal ones those with the lower numbers, in the order of
// their numbers, and their shares (ops/definitions/q4nx_moe.py). NaN is the least. Arguments:
// logits [t, experts], chosen int32 and shares [t, per_row], then, if there are any, bias and
// scales [experts].
KernelDescription choose_experts(const RouterShape& shape);
Grid choose_experts_grid(std::int64_t rows);

// Arguments: chosen int32 [choices]; order int32 [choices], choices by their experts, of one expert
// in their own order; tiles int32 [tiles_of_experts(), 3], an expert, and the first place in
// `order` and that behind the last of at most `tile` choices of it, which are none in some tiles;
// parameter: choices.
KernelDescription sort_by_expert(std::int64_t experts, std::int64_t tile);
Grid sort_by_expert_grid(std::int64_t experts);
std::int64_t tiles_of_experts(std::int64_t experts, std::int64_t choices, std::int64_t tile);

struct AnswersShape {
  std::int64_t experts = 0;
  std::int64_t per_row = 0;
  std::int64_t hidden = 0;
  bool has_bias = false;
  bool has_residual = false;
};

// y = the sum of shares times answers, in the order of choices. Arguments: answers [t per_row,
// hidden], shares [t, per_row], y [t, hidden], then, if the shape has them, chosen int32 [t,
// per_row] and bias [experts, hidden], which answers get; residual [t, hidden].
KernelDescription sum_of_answers(const AnswersShape& shape);
Grid sum_of_answers_grid(std::int64_t hidden, std::int64_t rows);

}  // namespace flownpu::gpu
