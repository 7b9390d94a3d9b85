// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/driver/xrt_plugin.h"

#include <algorithm>
#include <iterator>

#include "ops/npu/driver/runtime.h"

namespace flownpu::npu {
namespace {

using xrt_abi::Status;

constexpr const char* kAfterFailure =
    "the driver's message is in `sudo dmesg`; close the session and make it again";

// A status's meaning for the caller, and its remedy. The last entry is also for unknown
// statuses.
struct Meaning {
  Status status;
  Failure failure;
  const char* advice;
};
constexpr Meaning kMeanings[] = {
    {Status::kNoDevice, Failure::kNoDevice,
     "load the driver (sudo modprobe amdxdna); `flownpu doctor` tells whether the NPU, its driver "
     "or its firmware is missing"},
    {Status::kNotStarted, Failure::kNoDevice,
     "this machine has none, or the driver could not start it, as where its firmware is missing or "
     "of another age than the driver: `flownpu doctor` tells which, and names the command that "
     "mends it"},
    {Status::kPermission, Failure::kPermission,
     "join the group of the device file: sudo usermod -aG render \"$USER\", then log in again"},
    {Status::kLockedMemory, Failure::kPermission,
     "the driver locks memory, more than this process may: echo '* - memlock unlimited' | sudo tee "
     "-a /etc/security/limits.conf, then log in again; as root, for whom that does not hold, start "
     "the container with --ulimit memlock=-1, or the service with LimitMEMLOCK=infinity"},
    {Status::kTooOld, Failure::kVersion,
     "XRT 2.19 or newer is needed, and a driver and a firmware of the NPU of its age: `flownpu "
     "doctor MODEL` shows what is here, and names the command that installs them"},
    {Status::kIncomplete, Failure::kVersion, kInstallXrt},
    {Status::kDesign, Failure::kArtifact,
     "build the designs for this NPU anew (`flownpu build MODEL --for xclbin`)"},
    {Status::kContexts, Failure::kMemory, "close other programs that use the NPU"},
    {Status::kMemory, Failure::kMemory,
     "use a smaller context, or close other programs that use the NPU"},
    {Status::kSubmit, Failure::kSubmit, kAfterFailure},
    {Status::kCommand, Failure::kCommand, kAfterFailure},
    {Status::kTimeout, Failure::kTimeout, kAfterFailure},
};

}  // namespace

void ErrorText::check(Status status, std::string_view what) const {
  if (status == Status::kOk) return;
  const Meaning* const meaning =
      std::find_if(std::begin(kMeanings), std::end(kMeanings) - 1,
                   [&](const Meaning& of) { return of.status == status; });
  fail_device(meaning->failure, what, ": ", buffer_.data(), "; ", meaning->advice);
}

}  // namespace flownpu::npu
