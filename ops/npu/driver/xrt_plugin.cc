// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/driver/xrt_plugin.h"

#include <sstream>

#include "ops/npu/driver/runtime.h"

namespace flownpu::npu {
namespace {

using xrt_abi::Status;

constexpr const char* kAfterFailure =
    "the driver's message is in `sudo dmesg`; close the session and make it again";

// What a status is to the caller, and what to do about it.
struct Meaning {
  Failure failure;
  const char* advice;
};

Meaning meaning_of(Status status) {
  switch (status) {
    case Status::kNoDevice:
      return {
          Failure::kNoDevice,
          "load the driver (sudo modprobe amdxdna); `flownpu doctor` tells whether the NPU, its "
          "driver or its firmware is missing"};
    case Status::kNotStarted:
      return {Failure::kNoDevice,
              "this machine has none, or the driver could not start it, as where its firmware is "
              "missing or of another age than the driver: `flownpu doctor` tells which, and names "
              "the command that mends it"};
    case Status::kPermission:
      return {Failure::kPermission,
              "join the group of the device file: sudo usermod -aG render \"$USER\", then log in "
              "again"};
    case Status::kLockedMemory:
      return {Failure::kPermission,
              "the driver locks memory, more than this process may: echo '* - memlock unlimited' | "
              "sudo tee -a /etc/security/limits.conf, then log in again; as root, for whom that "
              "does not hold, start the container with --ulimit memlock=-1, or the service with "
              "LimitMEMLOCK=infinity"};
    case Status::kTooOld:
      return {
          Failure::kVersion,
          "XRT 2.19 or newer is needed, and a driver and a firmware of the NPU of its age: "
          "`flownpu doctor MODEL` shows what is here, and names the command that installs them"};
    case Status::kIncomplete:
      return {Failure::kVersion, kInstallXrt};
    case Status::kDesign:
      return {Failure::kArtifact,
              "build the designs for this NPU anew (`flownpu build MODEL --for xclbin`)"};
    case Status::kContexts:
      return {Failure::kMemory, "close other programs that use the NPU"};
    case Status::kMemory:
      return {Failure::kMemory, "use a smaller context, or close other programs that use the NPU"};
    case Status::kSubmit:
      return {Failure::kSubmit, kAfterFailure};
    case Status::kCommand:
      return {Failure::kCommand, kAfterFailure};
    case Status::kTimeout:
    case Status::kOk:
      break;
  }
  return {Failure::kTimeout, kAfterFailure};
}

}  // namespace

void ErrorText::check(Status status, std::string_view what) const {
  if (status == Status::kOk) return;
  const Meaning meaning = meaning_of(status);
  std::ostringstream message;
  message << "[FlowNPU] " << what << ": " << buffer_.data() << "; " << meaning.advice;
  throw DeviceError(meaning.failure, message.str());
}

}  // namespace flownpu::npu
