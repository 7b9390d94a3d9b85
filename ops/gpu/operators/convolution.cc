// SPDX-License-Identifier: Apache-2.0
// Conv and FusedConv of images with one or two axes.
#include <vector>

#include "ops/cpu/windows.h"
#include "ops/gpu/kernels/kernels.h"
#include "ops/gpu/operators/run.h"
#include "ops/gpu/operators/step.h"

namespace flownpu::gpu {
namespace {

enum ConvolutionInput : std::uint8_t { kX, kW, kB, kZ };
constexpr std::size_t kY = cpu::SlidingWindows::kAxes - 2;  // of an image's axes the last but one

std::vector<std::int64_t> kernel_of(const Node& node) {
  const Shape weight = node.input(kW)->shape.value_or(Shape{1, 1, 1});  // the host checked it
  return {weight.begin() + 2, weight.end()};
}

class Convolution final : public HostCheckedStep {
 public:
  Convolution(const Node& node, StepArguments arguments)
      : HostCheckedStep(node, std::move(arguments)), windows_(node, kernel_of(node)) {
    const Shape weight = node.input(kW)->shape.value_or(Shape{1, 1, 1});
    shape_.groups = node.integer("group", 1);
    shape_.rows = weight[0] / shape_.groups;
    shape_.channels = weight[1];
    for (std::size_t axis = 0; axis < shape_.axes.size(); ++axis) {
      const cpu::Windows& windows = windows_.windows()[kY + axis];
      shape_.axes[axis] = {windows.kernel, windows.stride, windows.dilation};
    }
    shape_.given = element_of(node.input(kX)->type);
    shape_.weight = element_of(node.input(kW)->type);
    shape_.has_bias = node.input(kB) != nullptr;
    shape_.has_residual = node.input(kZ) != nullptr;
    shape_.upsample = node.integer("upsample", 1);
    shape_.is_relu = node.text("activation", "") == "Relu";
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    if (outputs[0].shape.elements() == 0) return;
    Shape images = inputs[kX].shape;
    for (int axis = 2; axis < images.rank(); ++axis) images[axis] *= shape_.upsample;
    const cpu::SlidingWindows::Axes axes = windows_.fitted(images);
    const cpu::Windows& down = axes[kY];
    const cpu::Windows& over = axes[kY + 1];
    const std::int64_t plane = down.count * over.count;
    const std::int64_t columns = inputs[kX].shape[0] * plane;
    Run run(context());
    const Buffer* y = run.output(outputs[0]);
    std::vector<const Buffer*> buffers{at(run, inputs, kX), at(run, inputs, kW), y};
    if (shape_.has_bias) buffers.push_back(at(run, inputs, kB));
    if (shape_.has_residual) buffers.push_back(at(run, inputs, kZ));
    run.launch(
        *prepared({}, [&] { return convolution(shape_); }).kernel,
        convolution_grid(shape_, columns), buffers,
        std::vector{shape_.rows, shape_.rows * shape_.groups, shape_.channels,
                    shape_.channels * shape_.groups, shape_.channels * down.kernel * over.kernel,
                    columns, plane, over.count, down.size / shape_.upsample,
                    over.size / shape_.upsample, down.head, over.head});
    run.read(y, outputs[0]);
  }

 private:
  cpu::SlidingWindows windows_;
  ConvolutionShape shape_;
};

}  // namespace

std::string refused_convolution(const Node& node) {
  const Value& weight = *node.input(kW);
  if (!weight.shape || weight.shape->rank() > 4)
    return "expected images with one or two axes on device 'gpu'";
  return refused_floats(node);
}

std::unique_ptr<Step> make_convolution(const Node& node, StepArguments arguments) {
  return std::make_unique<Convolution>(node, std::move(arguments));
}

}  // namespace flownpu::gpu
