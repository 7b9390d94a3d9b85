// SPDX-License-Identifier: Apache-2.0
// Winograd's kernel, tried on integers: weights are multiples of 4, so that halving them twice
// leaves integers, and all sums are integers below 2^24, which must be equal to convolution()'s.
#include <array>
#include <cstring>
#include <span>
#include <vector>

#include "ops/error.h"
#include "ops/gpu/context/tuner.h"
#include "ops/gpu/kernels/images/convolution.h"
#include "ops/gpu/language/generate.h"

namespace flownpu::gpu {
namespace {

// Sizes that are no multiples of a tile, or of a step.
constexpr std::int64_t kRows = 35;
constexpr std::int64_t kChannels = 5;
constexpr std::int64_t kHeight = 7;
constexpr std::int64_t kWidth = 9;
constexpr std::int64_t kTaps = 9;

bool are_winograds(const ConvolutionShape& shape) {
  for (const ConvolutionShape::Axis& axis : shape.axes) {
    if (axis.kernel != 3 || axis.stride != 1 || axis.dilation != 1) return false;
  }
  return true;
}

bool fits(const KernelDescription& kernel, const DeviceFacts& facts) {
  constexpr std::int64_t kBytes = 12 << 10;
  return facts.work_group >= kernel.lanes && facts.local_memory >= kBytes;
}

// Integers from -4 to 4 times `factor`.
std::vector<float> integers(std::int64_t count, float factor) {
  std::vector<float> made(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < made.size(); ++i)
    made[i] = factor * static_cast<float>(static_cast<int>(i * i * 31 % 9) - 4);
  return made;
}

std::vector<float> computed(Context& context, const KernelDescription& kernel, const Grid& grid) {
  const std::vector<float> pixels = integers(kChannels * kHeight * kWidth, 1);
  const std::vector<float> weight = integers(kRows * kChannels * kTaps, 4);
  std::vector<float> found(static_cast<std::size_t>(kRows * kHeight * kWidth));
  const auto written = [&](const std::vector<float>& content) {
    Buffer buffer = context.allocate(content.size() * sizeof(float));
    context.write(buffer, std::as_bytes(std::span(content)));
    return buffer;
  };
  const Buffer x = written(pixels);
  const Buffer w = written(weight);
  const Buffer y = written(found);
  std::vector<KernelArgument> arguments{&x, &w, &y};
  for (const std::int64_t parameter :
       {kRows, kRows, kChannels, kChannels, kChannels * kTaps, kHeight * kWidth, kHeight * kWidth,
        kWidth, kHeight, kWidth, std::int64_t{1}, std::int64_t{1}})
    arguments.emplace_back(static_cast<std::int32_t>(parameter));
  context.launch(*context.compile(kernel), arguments, grid);
  context.read(y, std::as_writable_bytes(std::span(found)));
  return found;
}

}  // namespace

bool winograd_is_right(Context& context) {
  constexpr ConvolutionShape::Axis kThree{.kernel = 3};
  const ConvolutionShape shape{.rows = kRows, .channels = kChannels, .axes = {kThree, kThree}};
  const KernelDescription kernel = winograd(shape);
  if (!fits(kernel, context.facts())) return false;
  const std::string key =
      context.identity() + "whether this is right:\n" + generate(kernel, context.dialect());
  if (const auto kept = context.cache().find(key); kept && kept->size() == 1)
    return kept->front() != 0;
  constexpr std::int64_t kPixels = kHeight * kWidth;
  const bool is_right = computed(context, kernel, winograd_grid(shape, kPixels, kPixels, kWidth)) ==
                        computed(context, convolution(shape), convolution_grid(shape, kPixels));
  context.cache().keep(key, {static_cast<unsigned char>(is_right)});
  return is_right;
}

std::vector<bool> ways_with_winograd(GpuWinograd wanted, const ConvolutionShape& shape,
                                     Context& context) {
  if (wanted == GpuWinograd::kOff || !are_winograds(shape)) return {false};
  if (wanted == GpuWinograd::kAuto && !Tuner(context).measures()) return {false};
  if (winograd_is_right(context))
    return wanted == GpuWinograd::kOn ? std::vector{true} : std::vector{false, true};
  if (wanted == GpuWinograd::kAuto) return {false};
  fail("[FlowNPU] device 'gpu': expected a right kernel of Winograd's convolutions, which ",
       "gpu_winograd = on asks for, got ",
       fits(winograd(shape), context.facts()) ? "wrong numbers" : "too small work-groups", " on ",
       context.facts().title(), " with ", context.api(), ": use gpu_winograd = auto");
}

}  // namespace flownpu::gpu
