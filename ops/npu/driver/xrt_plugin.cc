// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/driver/xrt_plugin.h"

#include <dlfcn.h>

#include <filesystem>
#include <sstream>

#include "ops/npu/driver/own_folder.h"
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
          "load the driver (sudo modprobe amdxdna) and look for the NPU with `xrt-smi examine`"};
    case Status::kPermission:
      return {Failure::kPermission,
              "join the group of the device file (sudo usermod -aG render $USER) and log in again"};
    case Status::kLockedMemory:
      return {Failure::kPermission,
              "the driver locks memory: allow it (`ulimit -l unlimited`, and for good a line `* - "
              "memlock unlimited` in /etc/security/limits.conf) and log in again"};
    case Status::kTooOld:
      return {Failure::kVersion, "install XRT 2.19 or newer and the driver that comes with it"};
    case Status::kIncomplete:
      return {Failure::kVersion, "install XRT with its part for NPUs (Debian: libxrt-npu2)"};
    case Status::kDesign:
      return {Failure::kArtifact,
              "build the designs for this NPU anew (`flownpu build MODEL --for xclbin`)"};
    case Status::kContexts:
      return {Failure::kMemory, "close other programs that use the NPU"};
    case Status::kMemory:
      return {Failure::kMemory,
              "use a smaller context, or close programs that hold memory of the NPU"};
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

[[noreturn]] void refuse(const std::string& reason) {
  throw DeviceError(Failure::kVersion, "[FlowNPU] device 'npu': " + reason);
}

// Why the loader refused a plugin that is there; only its text tells a library that is missing from
// one without a symbol.
[[noreturn]] void refuse_as_loader(const std::string& text) {
  if (text.find("cannot open shared object file") != std::string::npos) {
    refuse("XRT is not installed (" + text +
           "); install it (Debian: libxrt2 and libxrt-npu2), or source its setup.sh");
  }
  refuse("the installed XRT does not fit this build (" + text +
         "); install XRT 2.19 or newer, or build FlowNPU with the installed one");
}

}  // namespace

const xrt_abi::Table& load_xrt_plugin(std::string file) {
  if (file.empty()) file = (own_folder() / kXrtPlugin).string();
  if (!std::filesystem::exists(file)) {
    refuse("this build of FlowNPU has no " + file +
           "; install XRT 2.19 or newer with its headers (Debian: libxrt-dev) and build FlowNPU "
           "again, or use device = cpu");
  }
  void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* error = dlerror();
    refuse_as_loader(error == nullptr ? "no reason given" : error);
  }
  const auto get_table = reinterpret_cast<xrt_abi::GetTable>(dlsym(library, xrt_abi::kGetTable));
  if (get_table == nullptr) refuse(file + " is no plugin of FlowNPU; install FlowNPU again");
  const xrt_abi::Table* table = get_table();
  if (table == nullptr || table->version != xrt_abi::kVersion) {
    refuse(file + " is of another version of FlowNPU; install FlowNPU again");
  }
  return *table;
}

void ErrorText::check(Status status, std::string_view what) const {
  if (status == Status::kOk) return;
  const Meaning meaning = meaning_of(status);
  std::ostringstream message;
  message << "[FlowNPU] " << what << ": " << buffer_.data() << "; " << meaning.advice;
  throw DeviceError(meaning.failure, message.str());
}

}  // namespace flownpu::npu
