// SPDX-License-Identifier: Apache-2.0
// PlanWithFallback: a partition's plan, and a second one on another device, which takes over when
// the first one's device cannot continue.
#pragma once

#include <atomic>
#include <memory>

#include "ep/partition/execution_plan.h"

namespace flownpu {

// The other plan computes a run that the device does not take (Unsupported), and every run after
// one in which the device failed (DeviceFailed). The failed run itself ends with the error, because
// it is not known which of its outputs were written. Before the other plan runs, the device writes
// back the caller's state (Device::restore), so that the other plan continues from it.
class PlanWithFallback {
 public:
  // `device`: the device of `plan`. `other` may be null: then nothing takes over.
  PlanWithFallback(std::shared_ptr<const Device> device, std::unique_ptr<const ExecutionPlan> plan,
                   std::unique_ptr<const ExecutionPlan> other);

  // Like ExecutionPlan::run. When the device fails, the error also says what happens to later runs.
  void run(PlanIo& io, StepObserver* observer) const;

 private:
  void run_other(PlanIo& io, StepObserver* observer) const;

  std::shared_ptr<const Device> device_;
  std::unique_ptr<const ExecutionPlan> plan_;
  std::unique_ptr<const ExecutionPlan> other_;
  mutable std::atomic<bool> failed_ = false;
};

}  // namespace flownpu
