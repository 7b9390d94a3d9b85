// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/gpu/doubles/faults.h"

#include <algorithm>
#include <array>
#include <utility>

namespace loader_double {

void Faults::inject(std::string call, std::int64_t nth, Way way, std::int32_t code) {
  const std::lock_guard lock(mutex_);
  call_ = std::move(call);
  left_ = nth;
  fate_ = {way, code};
  begun_ = false;
}

void Faults::reset() {
  const std::lock_guard lock(mutex_);
  call_.clear();
  fate_ = {};
  begun_ = false;
  calls_.clear();
  endless_waits_ = 0;
}

// Whether a lost device refuses the call; releasing objects and queries still work.
bool Faults::is_work(std::string_view call) {
  constexpr std::array kOthers{std::string_view("clFlush"),
                               std::string_view("clCreateBuffer"),
                               std::string_view("clBuildProgram"),
                               std::string_view("vkQueueSubmit"),
                               std::string_view("vkWaitForFences"),
                               std::string_view("vkAllocateMemory"),
                               std::string_view("vkCreateComputePipelines")};
  return call.starts_with("clEnqueue") || std::ranges::find(kOthers, call) != kOthers.end();
}

// FlowNPU's reads and writes block.
bool Faults::waits(std::string_view call) {
  return call == "clEnqueueReadBuffer" || call == "clEnqueueWriteBuffer";
}

Faults::Fate Faults::meet(std::string_view call) {
  constexpr std::int32_t kOutOfResources = -5;
  const std::lock_guard lock(mutex_);
  const auto counted = calls_.try_emplace(std::string(call), 0).first;
  ++counted->second;
  if (fate_.way == Way::kNone) return {};
  if (!begun_) {
    if (call != call_ || --left_ > 0) return {};
    begun_ = true;
    const Fate fate = fate_;
    if (fate.way == Way::kOnce) fate_ = {};
    return fate;
  }
  switch (fate_.way) {
    case Way::kLost:
      return is_work(call) ? fate_ : Fate{};
    case Way::kHung:
      if (waits(call)) {
        ++endless_waits_;
        return {Way::kOnce, kOutOfResources};  // so that a test ends
      }
      return call == "clEnqueueNDRangeKernel" || call == "clEnqueueCopyBuffer" ||
                     call == "vkQueueSubmit" || call == "vkWaitForFences"
                 ? fate_
                 : Fate{};
    default:
      return {};
  }
}

Faults::Fate Faults::begun() const {
  const std::lock_guard lock(mutex_);
  return begun_ ? fate_ : Fate{};
}

std::int64_t Faults::calls(const std::string& call) const {
  const std::lock_guard lock(mutex_);
  const auto found = calls_.find(call);
  return found == calls_.end() ? 0 : found->second;
}

std::int64_t Faults::endless_waits() const {
  const std::lock_guard lock(mutex_);
  return endless_waits_;
}

Faults& faults() {
  static Faults all;
  return all;
}

}  // namespace loader_double
