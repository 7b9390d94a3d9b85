// SPDX-License-Identifier: Apache-2.0
// ComputeInfo: a Program as ORT's OrtNodeComputeInfo.
#pragma once

#include <memory>

#include "ep/api.h"
#include "ep/program.h"

namespace flownpu {

class ComputeInfo final : public ort::OrtNodeComputeInfo {
 public:
  ComputeInfo(const Api& api, std::unique_ptr<Program> program);

 private:
  Api api_;
  std::unique_ptr<Program> program_;
};

}  // namespace flownpu
