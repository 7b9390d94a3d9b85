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
// What installs a thing depends on the system, and `flownpu doctor` knows that of each.
constexpr const char* kInstall = "`flownpu doctor` names the command that installs it here";

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
      return {Failure::kVersion, kInstall};
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

[[noreturn]] void refuse(const std::string& reason) {
  throw DeviceError(Failure::kVersion, "[FlowNPU] device 'npu': " + reason);
}

// Why the loader refused a plugin that is there; only its text tells a library that is missing,
// whose name it begins with, from one without a symbol.
[[noreturn]] void refuse_as_loader(const std::string& text) {
  if (const std::size_t end = text.find(": cannot open shared object file");
      end != std::string::npos) {
    const std::string library = text.substr(0, end);
    const std::string missing =
        library.rfind("libxrt", 0) == 0 ? "XRT is not installed" : "XRT needs a library more";
    refuse(missing + " (" + text + "); " + kInstall +
           ", or the setup.sh to source where XRT is at another place");
  }
  refuse("the installed XRT does not fit this build (" + text +
         "); install XRT 2.19 or newer, or build FlowNPU with the installed one: `flownpu doctor` "
         "names the command");
}

}  // namespace

const xrt_abi::Table& load_xrt_plugin(std::string file) {
  if (file.empty()) file = (own_folder() / kXrtPlugin).string();
  if (!std::filesystem::exists(file)) {
    refuse("this build of FlowNPU has no " + file +
           ": it was built without XRT's headers; `flownpu doctor` names the commands that install "
           "them and build it again, or use device = cpu");
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
