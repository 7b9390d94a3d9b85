// SPDX-License-Identifier: Apache-2.0
// An element of y, at each place of a view, from the elements of the operands at that place. A view
// is a walk over a tensor: its axes' steps, in elements, and where it begins. Operands that
// broadcast have steps of 0, transposed ones the steps of their own axes, parts an offset: one
// kernel computes functions, and moves. A lane has an element, so neighbours write neighbours.
#include "ops/gpu/kernels/kernels.h"
#include "ops/gpu/language/text.h"

namespace flownpu::gpu {
namespace {

constexpr std::int64_t kLanes = 64;

}  // namespace

KernelDescription elementwise(const ElementwiseShape& shape) {
  KernelDescription kernel{.name = "elementwise",
                           .constants = {{"alpha", shape.alpha}},
                           .parameters = {"count"},
                           .lanes = kLanes};
  std::string places;
  for (std::int64_t axis = 0; axis < shape.axes; ++axis) {
    kernel.parameters.push_back(text_of("size", axis));
    const std::string size = text_of("args.size", axis);
    places += axis + 1 < shape.axes
                  ? text_of("const int i", axis, " = rest % ", size, "; rest /= ", size, "; ")
                  : text_of("const int i", axis, " = rest; ");
  }
  const auto add = [&](const std::string& name, Element element, Access access) {
    kernel.tensors.push_back(
        {.name = name, .element = element, .access = access, .sizes = {text_of("all_", name)}});
    std::string place = text_of("args.", name, "_offset");
    kernel.parameters.push_back(name + "_offset");
    for (std::int64_t axis = 0; axis < shape.axes; ++axis) {
      kernel.parameters.push_back(text_of(name, "_step", axis));
      place += text_of(" + i", axis, " * args.", name, "_step", axis);
    }
    return place;
  };
  std::string operands;
  for (std::size_t i = 0; i < shape.operands.size(); ++i) {
    const std::string name(1, static_cast<char>('a' + i));
    const std::string place = add(name, shape.operands[i], Access::kRead);
    operands += text_of("const float ", name, " = args.", name, ".Read(", place, ");\n    ");
  }
  const std::string place = add("y", shape.result, Access::kWrite);
  kernel.body =
      text_of("\n  int rest = group(0) * args.lanes + lane();\n  if (rest < args.count) {\n    ",
              places, "\n    ", operands, "args.y.Write(", shape.code, ", ", place, ");\n  }\n");
  return kernel;
}

Grid elementwise_grid(std::int64_t count) {
  return {.groups = {q4nx::ceil_div(count, kLanes), 1, 1}, .lanes = kLanes};
}

}  // namespace flownpu::gpu
