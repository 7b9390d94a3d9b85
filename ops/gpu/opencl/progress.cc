// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/opencl/progress.h"

#include <algorithm>
#include <thread>

#include "ops/gpu/opencl/loader.h"
#include "ops/gpu/opencl/status.h"
#include "ops/system/variables.h"

namespace flownpu::gpu {
namespace {

// How long to wait for the kCommandsOfMark commands before a mark. A GPU's kernels take 64 x 27 ms
// if all are the largest product of a 4B model for a chunk of 256 tokens (27 G operations, at 1
// Tops). Linux's amdgpu resets a queue after 60 s, and its error says more than ours, so the limit
// is twice that. A CPU's OpenCL computes a hundredth of such a GPU's operations a second, and
// nothing resets it.
constexpr std::chrono::seconds kLimitOfGpu{120};
constexpr std::chrono::seconds kLimitOfCpu{1200};

// The pause between two looks is a 32nd of the time waited so far, so the end is seen at most 3 %
// late. Linux may prolong a sleep by 50 us, so shorter pauses only offer the core to other threads.
// The longest is a millisecond.
using Clock = std::chrono::steady_clock;

void pause(Clock::duration waited) {
  constexpr std::chrono::microseconds kShortest{50};
  constexpr std::chrono::microseconds kLongest{1000};
  const Clock::duration wanted = waited / 32;
  if (wanted < kShortest)
    std::this_thread::yield();
  else
    std::this_thread::sleep_for(std::min<Clock::duration>(wanted, kLongest));
}

}  // namespace

std::chrono::milliseconds time_limit(const DeviceFacts& facts) {
  return seconds_of(kTimeVariable, facts.is_software() ? kLimitOfCpu : kLimitOfGpu);
}

std::optional<cl::Int> end_of(cl::Event event, std::chrono::milliseconds limit) {
  for (const Clock::time_point begin = Clock::now();;) {
    cl::Int status = cl::kComplete;
    check(opencl().clGetEventInfo(event, cl::kEventStatus, sizeof(status), &status, nullptr),
          "clGetEventInfo", "waiting for commands");
    if (status <= cl::kComplete) return status;
    const Clock::duration waited = Clock::now() - begin;
    if (waited > limit) return std::nullopt;
    pause(waited);
  }
}

}  // namespace flownpu::gpu
