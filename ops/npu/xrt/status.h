// SPDX-License-Identifier: Apache-2.0
// Converts XRT's exceptions to a status and a text, which cross the C ABI.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include "ops/npu/driver/xrt_abi.h"

namespace flownpu::npu::xrt_abi {

// A failure that this plugin finds itself.
class StatusError : public std::runtime_error {
 public:
  StatusError(Status status, const std::string& text) : std::runtime_error(text), status_(status) {}
  Status status() const { return status_; }

 private:
  Status status_;
};

// The operation that failed: an error number means different things at different stages.
enum class Stage { kOpen, kLoad, kAllocate, kMove, kSubmit, kWait };

// The status of an error number of the system or the driver; for numbers without a meaning of their
// own, the status of a failure at this stage.
Status status_of(int number, Stage stage);

// Writes the content, as one line, and cut to the text's capacity.
void write(Text text, std::string_view content) noexcept;

// Turns the exception that is being handled into a status, and writes its message to `error`.
Status report(Stage stage, Text error) noexcept;

// Runs an action; an exception that it throws becomes a status, and its message is written to
// `error`.
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
