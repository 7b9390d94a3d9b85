// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/opencl/progress.h"

#include <algorithm>
#include <thread>

#include "ops/gpu/opencl/loader.h"
#include "ops/gpu/opencl/status.h"

namespace flownpu::gpu {
namespace {

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
