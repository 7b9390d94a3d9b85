// SPDX-License-Identifier: Apache-2.0
#include "ops/system/library.h"

#include <dlfcn.h>

#include <system_error>

namespace flownpu {

std::filesystem::path own_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&own_folder), &info) == 0 || info.dli_fname == nullptr)
    return {};
  std::error_code ignored;
  return std::filesystem::absolute(info.dli_fname, ignored).parent_path();
}

std::string library_file(std::string_view name) {
  return std::string("lib").append(name).append(".so");
}

// Nothing to do: the library is linked with -z nodelete.
void stay_loaded() {}

void* open_library(std::initializer_list<std::string_view> files, std::string& reasons) {
  for (const std::string_view file : files) {
    if (file.ends_with(".dll")) continue;
    if (void* library = dlopen(std::string(file).c_str(), RTLD_NOW | RTLD_LOCAL);
        library != nullptr)
      return library;
    const char* error = dlerror();
    reasons += reasons.empty() ? "" : "; ";
    reasons += error == nullptr ? "no reason given" : error;
  }
  return nullptr;
}

void* find_symbol(void* library, const char* name) { return dlsym(library, name); }

}  // namespace flownpu
