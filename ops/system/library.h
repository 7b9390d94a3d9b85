// SPDX-License-Identifier: Apache-2.0
// The shared library that contains this code, and the files of FlowNPU beside it.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace flownpu {

// The folder of the library; empty if the system does not tell it.
std::filesystem::path own_folder();

// The file name of a shared library: libNAME.so on Linux, NAME.dll on Windows.
std::string library_file(std::string_view name);

// Keeps the library in the process after it is unloaded, because ORT unloads an unregistered
// provider while sessions may still use it. Throws Error if the system refuses.
void stay_loaded();

}  // namespace flownpu
