// SPDX-License-Identifier: Apache-2.0
// ComputeInfo: adapts a partition to ORT's OrtNodeComputeInfo.
#pragma once

#include <memory>

#include "ep/api.h"
#include "ep/partition/plan_with_fallback.h"
#include "ep/run/cpu_provider.h"
#include "ep/run/termination.h"

namespace flownpu {

class ComputeInfo final : public ort::OrtNodeComputeInfo {
 public:
  // `elsewhere` computes runs that the plan does not take (Unsupported). Either may be null, but
  // not both. `termination` outlives this object.
  ComputeInfo(const Api& api, std::unique_ptr<PlanWithFallback> plan,
              std::unique_ptr<CpuProvider> elsewhere, Termination& termination);

 private:
  void run(OrtKernelContext* context) const;

  Api api_;
  std::unique_ptr<PlanWithFallback> plan_;
  std::unique_ptr<CpuProvider> elsewhere_;
  Termination& termination_;
};

}  // namespace flownpu
