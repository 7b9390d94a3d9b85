// SPDX-License-Identifier: Apache-2.0
// PlanWithFallback: a partition's plan, and a second one on another device, which takes over when
// the first one's device cannot continue, or computes the runs of the other stage.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "ep/partition/execution_plan.h"
#include "ops/transformer/staged_device.h"

namespace flownpu {

// The other plan computes a run that the device does not take (Unsupported), and every run after
// one in which the device failed (DeviceFailed). The failed run itself ends with the error, because
// it is not known which of its outputs were written. Before the other plan runs, the device writes
// back the caller's state (Device::restore), so that the other plan continues from it.
//
// With a StagedDevice the other plan is that of its other device, and computes the runs that its
// decoder's step leaves (OtherStage) as well. Runs then follow one another.
class PlanWithFallback {
 public:
  // `device`: the device of `plan`. `other` may be null: then nothing takes over.
  PlanWithFallback(std::shared_ptr<const Device> device, std::unique_ptr<const ExecutionPlan> plan,
                   std::unique_ptr<const ExecutionPlan> other);
  // `presents`: PlanIo's indices of the decoder's present keys and values. `falls_back`: whether
  // the other device also computes runs that the device does not take.
  PlanWithFallback(std::shared_ptr<const transformer::StagedDevice> device,
                   std::unique_ptr<const ExecutionPlan> plan,
                   std::unique_ptr<const ExecutionPlan> other, std::vector<std::size_t> presents,
                   bool falls_back);

  // Like ExecutionPlan::run. When the device fails, the error also says what happens to later runs.
  void run(PlanIo& io, StepObserver* observer) const;

 private:
  void run_other(PlanIo& io, StepObserver* observer) const;
  void run_stage(const transformer::OtherStage& stage, PlanIo& io, StepObserver* observer) const;

  std::shared_ptr<const Device> device_;
  std::shared_ptr<const transformer::StagedDevice> staged_;  // device_, or null
  std::unique_ptr<const ExecutionPlan> plan_;
  std::unique_ptr<const ExecutionPlan> other_;
  std::vector<std::size_t> presents_;
  bool falls_back_ = true;
  mutable std::atomic<bool> failed_ = false;
  mutable std::mutex one_run_;  // locked by the runs of a StagedDevice
};

}  // namespace flownpu
