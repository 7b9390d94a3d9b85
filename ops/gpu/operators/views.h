// SPDX-License-Identifier: Apache-2.0
// ViewStep: steps that compute an element of their outputs from the elements at the same place of
// views of their inputs (kernels/elementwise.cc).
#pragma once

#include <array>
#include <utility>
#include <vector>

#include "ops/gpu/kernels/kernels.h"
#include "ops/gpu/operators/step.h"

namespace flownpu::gpu {

// A walk over a tensor: for each axis of the walk the step in the tensor's elements.
struct View {
  std::array<std::int64_t, Shape::kMaxRank> steps{};
  std::int64_t offset = 0;
};
// The view of all elements of a row-major tensor.
View view_of(const Shape& shape);

class ViewStep : public HostCheckedStep {
 protected:
  // `code`: as in ElementwiseShape, for so many operands; `alpha`: its args.alpha.
  ViewStep(const Node& node, StepArguments arguments, std::string code, std::size_t operands,
           float alpha = 0);

  using Operand = std::pair<const Buffer*, View>;
  // The kernel over a walk of these sizes.
  void walk(Run& run, const Shape& sizes, const std::vector<Operand>& operands,
            const Operand& y) const;

 private:
  ElementwiseShape shape_;
};

}  // namespace flownpu::gpu
