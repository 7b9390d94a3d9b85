// SPDX-License-Identifier: Apache-2.0
// The shared library that contains this code, and the files of FlowNPU beside it; and libraries
// that the system may have.
#pragma once

#include <filesystem>
#include <initializer_list>
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

// A library that stays in the process: the first of these files that the system's loader finds.
// Names of other systems' libraries are passed over. Null if there is none; `reasons` then says
// why.
void* open_library(std::initializer_list<std::string_view> files, std::string& reasons);

// The address of what a library exports by this name; null if it exports nothing of this name.
void* find_symbol(void* library, const char* name);

}  // namespace flownpu
