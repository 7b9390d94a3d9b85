// SPDX-License-Identifier: Apache-2.0
#include "ops/system/library.h"

#include <windows.h>

#include <string>

#include "ops/error.h"

namespace flownpu {
namespace {

// The longest path on Windows in UTF-16, with the terminating zero.
constexpr DWORD kMostPath = 32768;

// The handle of the library that contains this code; null on failure.
HMODULE own_module(DWORD flags) {
  HMODULE module = nullptr;
  const auto* const inside = reinterpret_cast<const wchar_t*>(&own_folder);
  return GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | flags, inside, &module) == 0
             ? nullptr
             : module;
}

}  // namespace

std::filesystem::path own_folder() {
  std::wstring path(kMostPath, L'\0');
  HMODULE const module = own_module(GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT);
  if (module == nullptr) return {};
  path.resize(GetModuleFileNameW(module, path.data(), kMostPath));
  return std::filesystem::path(path).parent_path();
}

std::string library_file(std::string_view name) { return std::string(name).append(".dll"); }

void stay_loaded() {
  if (own_module(GET_MODULE_HANDLE_EX_FLAG_PIN) == nullptr)
    fail("[FlowNPU] Windows does not keep this library in the process: error ", GetLastError());
}

void* open_library(std::initializer_list<std::string_view> files, std::string& reasons) {
  for (const std::string_view file : files) {
    if (!file.ends_with(".dll")) continue;
    const std::filesystem::path path(std::u8string(file.begin(), file.end()));
    if (HMODULE library = LoadLibraryW(path.c_str()); library != nullptr) return library;
    reasons += reasons.empty() ? "" : "; ";
    reasons += std::string(file) + ": error " + std::to_string(GetLastError());
  }
  return nullptr;
}

void* find_symbol(void* library, const char* name) {
  return reinterpret_cast<void*>(GetProcAddress(static_cast<HMODULE>(library), name));
}

}  // namespace flownpu
