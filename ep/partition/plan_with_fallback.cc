// SPDX-License-Identifier: Apache-2.0
#include "ep/partition/plan_with_fallback.h"

#include <string>
#include <utility>
#include <vector>

#include "ops/error.h"

namespace flownpu {

PlanWithFallback::PlanWithFallback(std::shared_ptr<const Device> device,
                                   std::unique_ptr<const ExecutionPlan> plan,
                                   std::unique_ptr<const ExecutionPlan> other)
    : device_(std::move(device)), plan_(std::move(plan)), other_(std::move(other)) {}

void PlanWithFallback::run(PlanIo& io, StepObserver* observer) const {
  if (failed_ && other_ != nullptr) {
    run_other(io, observer);
    return;
  }
  try {
    plan_->run(io, observer);
  } catch (const Unsupported&) {
    if (other_ == nullptr) throw;
    run_other(io, observer);
  } catch (const DeviceFailed& error) {
    failed_ = true;
    if (other_ == nullptr) {
      throw DeviceFailed(std::string(error.what()) +
                         ". The session takes no more runs: make a new one; with the option "
                         "on_unsupported=cpu its CPU would go on");
    }
    throw DeviceFailed(std::string(error.what()) + ". The session's next runs are on its CPU");
  }
}

void PlanWithFallback::run_other(PlanIo& io, StepObserver* observer) const {
  std::vector<Tensor> inputs;
  for (const std::size_t index : plan_->fed()) inputs.push_back(io.input(index));
  device_->restore(inputs);
  other_->run(io, observer);
}

}  // namespace flownpu
