// SPDX-License-Identifier: Apache-2.0
// CallList: calls that follow one another, each with its arguments, a dispatch each.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ops/npu/compiled_designs.h"

namespace flownpu::npu {

class CallList {
 public:
  explicit CallList(std::shared_ptr<CompiledDesigns> designs) : designs_(std::move(designs)) {}

  // One more call; `name`: for messages. A view without a buffer stands for a part of the buffer
  // that run() is given. Throws DeviceError (kArtifact) unless the call takes these arguments.
  void add(const CallRecord& record, std::string name, std::vector<View> arguments);

  std::size_t size() const { return steps_.size(); }

  // Makes the calls at a position; `where`: for messages, after their names. Throws DeviceFailed.
  void run(std::int64_t position, const std::string& where, Buffer* buffer = nullptr);

 private:
  struct Step {
    std::string name;
    PreparedCall* call;
    std::vector<View> arguments;
  };

  std::shared_ptr<CompiledDesigns> designs_;
  std::map<const CallRecord*, std::unique_ptr<PreparedCall>> calls_;
  std::vector<Step> steps_;
};

}  // namespace flownpu::npu
