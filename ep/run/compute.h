// SPDX-License-Identifier: Apache-2.0
// ComputeInfo: a partition's program as ORT's OrtNodeComputeInfo.
#pragma once

#include <memory>

#include "ep/api.h"
#include "ep/program/resilient_program.h"
#include "ep/run/cpu_provider.h"

namespace flownpu {

class ComputeInfo final : public ort::OrtNodeComputeInfo {
 public:
  // Runs that the program does not take (Unsupported) are `elsewhere`'s, which may be null; one of
  // the two is there.
  ComputeInfo(const Api& api, std::unique_ptr<ResilientProgram> program,
              std::unique_ptr<CpuProvider> elsewhere);

 private:
  void run(OrtKernelContext* context) const;

  Api api_;
  std::unique_ptr<ResilientProgram> program_;
  std::unique_ptr<CpuProvider> elsewhere_;
};

}  // namespace flownpu
