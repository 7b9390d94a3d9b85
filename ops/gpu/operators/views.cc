// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/operators/views.h"

#include <algorithm>

#include "ops/gpu/operators/run.h"

namespace flownpu::gpu {

View view_of(const Shape& shape) {
  View view;
  std::int64_t step = 1;
  for (int axis = shape.rank() - 1; axis >= 0; --axis) {
    view.steps[static_cast<std::size_t>(axis)] = step;
    step *= shape[axis];
  }
  return view;
}

ViewStep::ViewStep(const Node& node, StepArguments arguments, std::string code,
                   std::size_t operands, float alpha)
    : HostCheckedStep(node, std::move(arguments)),
      shape_{.operands = std::vector(operands, element_of(node.inputs[0].type)),
             .result = element_of(node.outputs[0].type),
             .code = std::move(code),
             .alpha = alpha} {}

// Axes of one place are left out, and axes along which all tensors advance, or stay, are joined.
void ViewStep::walk(Run& run, const Shape& sizes, const std::vector<Operand>& operands,
                    const Operand& y) const {
  if (sizes.elements() == 0) return;
  std::vector<Operand> all = operands;
  all.push_back(y);
  const auto step = [&](std::size_t tensor, std::size_t axis) -> std::int64_t& {
    return all[tensor].second.steps[axis];
  };
  std::vector<std::pair<std::int64_t, std::size_t>> axes;  // size, and the axis with its steps
  for (int outer = sizes.rank() - 1; outer >= 0; --outer) {
    const auto axis = static_cast<std::size_t>(outer);
    if (sizes[outer] == 1) continue;
    bool joins = !axes.empty();
    for (std::size_t tensor = 0; joins && tensor < all.size(); ++tensor)
      joins = step(tensor, axis) == step(tensor, axes.back().second) * axes.back().first;
    if (joins) {
      axes.back().first *= sizes[outer];
    } else {
      axes.emplace_back(sizes[outer], axis);
    }
  }
  if (axes.empty()) axes.emplace_back(1, 0);
  std::vector<std::int64_t> parameters{sizes.elements()};
  for (const auto& [size, axis] : axes) parameters.push_back(size);
  std::vector<const Buffer*> buffers;
  for (const auto& [buffer, view] : all) {
    buffers.push_back(buffer);
    parameters.push_back(view.offset);
    for (const auto& [size, axis] : axes) parameters.push_back(view.steps[axis]);
  }
  const auto count = static_cast<std::int64_t>(axes.size());
  const auto make = [&] {
    ElementwiseShape shape = shape_;
    shape.axes = count;
    return elementwise(shape);
  };
  run.launch(*prepared({count}, make).kernel, elementwise_grid(sizes.elements()), buffers,
             parameters);
}

}  // namespace flownpu::gpu
