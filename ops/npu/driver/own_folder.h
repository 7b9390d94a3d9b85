// SPDX-License-Identifier: Apache-2.0
// Where the files are that FlowNPU brings along.
#pragma once

#include <filesystem>

namespace flownpu::npu {

// The folder of the shared library that this is linked into; empty if it cannot be told.
std::filesystem::path own_folder();

}  // namespace flownpu::npu
