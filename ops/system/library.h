// SPDX-License-Identifier: Apache-2.0
// The shared library that this is linked into, and the files beside it that FlowNPU brings along.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace flownpu {

// The folder of the library; empty if it cannot be told.
std::filesystem::path own_folder();

// What the file of a library is called: libNAME.so on Linux, NAME.dll on Windows.
std::string library_file(std::string_view name);

// Has the library stay in the process when it is unloaded: ORT unloads a provider that is
// unregistered, though sessions may still live in it. Throws Error if the system refuses.
void stay_loaded();

}  // namespace flownpu
