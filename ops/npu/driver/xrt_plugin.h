// SPDX-License-Identifier: Apache-2.0
// Loads the plugin that talks to XRT, and makes errors of what it says.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "ops/npu/driver/xrt_abi.h"

namespace flownpu::npu {

// Beside this library (library_file), where it was built with XRT's headers.
inline constexpr const char* kXrtPlugin = "flownpu_xrt";

// What installs XRT depends on the system, and `flownpu doctor` knows that of each.
inline constexpr const char* kInstallXrt =
    "`flownpu doctor` names the command that installs it here";

// Throws DeviceError (kVersion), by name, on a system where FlowNPU drives no NPU: on Windows.
void require_npu_system();

// Loads a plugin, which stays loaded: XRT's threads and exit handlers do not bear to be unloaded.
// `file`: empty for kXrtPlugin beside this library. Throws DeviceError (kVersion) that tells apart:
// there is none, XRT is not installed, XRT does not fit it, it does not fit FlowNPU; and what
// require_npu_system() does.
const xrt_abi::Table& load_xrt_plugin(std::string file);

// Takes what the plugin says in an error.
class ErrorText {
 public:
  xrt_abi::Text text() { return {buffer_.data(), buffer_.size()}; }
  // Throws DeviceError, with what was done, what XRT says and what to do, unless all went well.
  void check(xrt_abi::Status status, std::string_view what) const;

 private:
  std::array<char, 1024> buffer_{};
};

}  // namespace flownpu::npu
