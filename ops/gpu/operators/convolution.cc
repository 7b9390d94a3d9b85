// SPDX-License-Identifier: Apache-2.0
// Conv and FusedConv of images with one or two axes.
#include "ops/gpu/kernels/images/convolution.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ops/cpu/windows.h"
#include "ops/gpu/context/tuner.h"
#include "ops/gpu/language/generate.h"
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
  Convolution(const Node& node, GpuWinograd wanted, StepArguments arguments)
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
    const std::lock_guard lock(context().mutex());
    ways_ = ways_with_winograd(wanted, shape_, context());
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
    const std::vector parameters{shape_.rows,
                                 shape_.rows * shape_.groups,
                                 shape_.channels,
                                 shape_.channels * shape_.groups,
                                 shape_.channels * down.kernel * over.kernel,
                                 columns,
                                 plane,
                                 over.count,
                                 down.size / shape_.upsample,
                                 over.size / shape_.upsample,
                                 down.head,
                                 over.head};
    const auto launch = [&](std::size_t way) {
      const bool by_winograd = ways_[way];
      run.launch(*prepared({by_winograd ? 1 : 0},
                           [&] { return by_winograd ? winograd(shape_) : convolution(shape_); })
                      .kernel,
                 by_winograd ? winograd_grid(shape_, columns, plane, over.count)
                             : convolution_grid(shape_, columns),
                 buffers, parameters);
    };
    launch(fastest(parameters, launch));
    run.read(y, outputs[0]);
  }

 private:
  // The way for images of such sizes, measured when they first occur. Needs a Run.
  std::size_t fastest(const std::vector<std::int64_t>& parameters,
                      const std::function<void(std::size_t)>& launch) const {
    if (ways_.size() < 2) return 0;
    if (const auto known = fastest_.find(parameters); known != fastest_.end()) return known->second;
    std::string what = generate(convolution(shape_), context().dialect());
    for (const std::int64_t parameter : parameters) what += " " + std::to_string(parameter);
    return fastest_[parameters] = Tuner(context()).fastest(what, ways_.size(), launch);
  }

  cpu::SlidingWindows windows_;
  ConvolutionShape shape_;
  std::vector<bool> ways_;  // ways_with_winograd()
  // By the sizes of images; under the context's mutex.
  mutable std::map<std::vector<std::int64_t>, std::size_t> fastest_;
};

}  // namespace

std::string refused_convolution(const Node& node) {
  const Value& weight = *node.input(kW);
  if (!weight.shape || weight.shape->rank() > 4)
    return "expected images with one or two axes on device 'gpu'";
  return refused_floats(node);
}

std::unique_ptr<Step> make_convolution(const Node& node, StepArguments arguments) {
  const GpuWinograd wanted = arguments.winograd;
  return std::make_unique<Convolution>(node, wanted, std::move(arguments));
}

}  // namespace flownpu::gpu
