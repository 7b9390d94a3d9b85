// SPDX-License-Identifier: Apache-2.0
// Options with a few named values: the names that users write, shared by the execution provider and
// flownpu._native.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

#include "ops/device.h"
#include "ops/error.h"

namespace flownpu {

template <typename Enum>
using Choice = std::pair<std::string_view, Enum>;

inline constexpr std::array<Choice<Activations>, 2> kActivationsChoices{
    {{"bf16", Activations::kBFloat16}, {"int8", Activations::kInt8}}};
inline constexpr std::array<Choice<GpuApi>, 3> kGpuApiChoices{
    {{"auto", GpuApi::kAuto}, {"opencl", GpuApi::kOpenCl}, {"vulkan", GpuApi::kVulkan}}};
inline constexpr std::array<Choice<GpuDtype>, 3> kGpuDtypeChoices{
    {{"auto", GpuDtype::kAuto}, {"fp16", GpuDtype::kFloat16}, {"fp32", GpuDtype::kFloat32}}};
inline constexpr std::array<Choice<GpuWeights>, 3> kGpuWeightsChoices{
    {{"auto", GpuWeights::kAuto}, {"buffer", GpuWeights::kBuffer}, {"image", GpuWeights::kImage}}};
inline constexpr std::array<Choice<GpuMatrices>, 3> kGpuMatricesChoices{
    {{"auto", GpuMatrices::kAuto}, {"on", GpuMatrices::kOn}, {"off", GpuMatrices::kOff}}};
inline constexpr std::array<Choice<GpuWinograd>, 3> kGpuWinogradChoices{
    {{"auto", GpuWinograd::kAuto}, {"on", GpuWinograd::kOn}, {"off", GpuWinograd::kOff}}};

// The choice that the text `value` names for the option `key`. Throws Error, which lists the valid
// names, for any other text.
template <typename Enum, std::size_t N>
Enum choose(std::string_view key, std::string_view value,
            const std::array<Choice<Enum>, N>& choices) {
  std::string valid;
  for (const auto& [name, choice] : choices) {
    if (name == value) return choice;
    valid += (valid.empty() ? "" : ", ") + std::string(name);
  }
  fail("[FlowNPU] option ", key, " = '", value, "' is not known; expected one of: ", valid);
}

}  // namespace flownpu
