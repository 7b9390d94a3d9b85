// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/context/time_limit.h"

#include "ops/system/variables.h"

namespace flownpu::gpu {
namespace {

// How long to wait for the 64 commands before a mark (kCommandsOfMark), or of a batch. A GPU's
// kernels take 64 x 27 ms if all are the largest product of a 4B model for a chunk of 256 tokens
// (27 G operations, at 1 Tops). Linux's amdgpu resets a queue after 60 s, and its error says more
// than ours, so the limit is twice that. A CPU's OpenCL computes a hundredth of such a GPU's
// operations a second, and nothing resets it.
constexpr std::chrono::seconds kLimitOfGpu{120};
constexpr std::chrono::seconds kLimitOfCpu{1200};

}  // namespace

std::chrono::milliseconds time_limit(const DeviceFacts& facts) {
  return seconds_of(kTimeVariable, facts.is_software() ? kLimitOfCpu : kLimitOfGpu);
}

}  // namespace flownpu::gpu
