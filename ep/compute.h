// SPDX-License-Identifier: Apache-2.0
// ComputeInfo: a partition's program as ORT's OrtNodeComputeInfo.
#pragma once

#include <memory>

#include "ep/api.h"
#include "ep/resilient_program.h"

namespace flownpu {

class ComputeInfo final : public ort::OrtNodeComputeInfo {
 public:
  ComputeInfo(const Api& api, std::unique_ptr<ResilientProgram> program);

 private:
  Api api_;
  std::unique_ptr<ResilientProgram> program_;
};

}  // namespace flownpu
