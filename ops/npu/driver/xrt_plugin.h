// SPDX-License-Identifier: Apache-2.0
// Loads the plugin that talks to XRT, and turns its statuses into errors.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "ops/npu/driver/xrt_abi.h"

namespace flownpu::npu {

// The plugin's name (library_file); it lies beside this library if it was built, for which CMake
// needs XRT's headers.
inline constexpr const char* kXrtPlugin = "flownpu_xrt";

// Advice for messages: how to install XRT depends on the system, and `flownpu doctor` knows how.
inline constexpr const char* kInstallXrt =
    "`flownpu doctor` names the command that installs it here";

// Throws DeviceError (kVersion), which names the system, where FlowNPU drives no NPU: on Windows.
void require_npu_system();

// Loads a plugin, which stays loaded: XRT's threads and exit handlers do not survive unloading.
// `file`: empty for kXrtPlugin beside this library. Throws DeviceError (kVersion) whose message
// says which of these it is: there is no plugin, XRT is not installed, XRT does not fit the plugin,
// the plugin does not fit FlowNPU. Throws what require_npu_system() throws, too.
const xrt_abi::Table& load_xrt_plugin(std::string file);

// Receives the plugin's message about an error.
class ErrorText {
 public:
  xrt_abi::Text text() { return {buffer_.data(), buffer_.size()}; }
  // Throws DeviceError, with what was being done, what XRT says and what to do, unless status is
  // kOk.
  void check(xrt_abi::Status status, std::string_view what) const;

 private:
  std::array<char, 1024> buffer_{};
};

}  // namespace flownpu::npu
