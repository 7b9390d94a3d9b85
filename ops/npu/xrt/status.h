// SPDX-License-Identifier: Apache-2.0
// What XRT throws, as a status and a text that cross the C ABI.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include "ops/npu/driver/xrt_abi.h"

namespace flownpu::npu::xrt_abi {

// A failure that we find ourselves.
class StatusError : public std::runtime_error {
 public:
  StatusError(Status status, const std::string& text) : std::runtime_error(text), status_(status) {}
  Status status() const { return status_; }

 private:
  Status status_;
};

// What was being done: the same error number means different things.
enum class Stage { kOpen, kLoad, kAllocate, kMove, kSubmit, kWait };

// What an error number of the system or of the driver means; for those that say nothing of their
// own, what a failure at this stage is.
Status status_of(int number, Stage stage);

void write(Text text, std::string_view content) noexcept;

// Turns the exception that is being handled into a status, and writes its message to `error`.
Status report(Stage stage, Text error) noexcept;

// Runs an action; what it throws becomes a status.
template <typename Action>
Status guard(Stage stage, Text error, const Action& action) noexcept {
  try {
    action();
    return Status::kOk;
  } catch (...) {
    return report(stage, error);
  }
}

}  // namespace flownpu::npu::xrt_abi
