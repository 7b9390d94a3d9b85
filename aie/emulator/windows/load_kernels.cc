// SPDX-License-Identifier: Apache-2.0
#include <windows.h>

#include <system_error>

#include "aie/emulator/emulator.h"

namespace flownpu::emulator {

const aie_host::KernelTable& load_kernels(const std::filesystem::path& path) {
  HMODULE const library = LoadLibraryW(path.c_str());
  if (library == nullptr) {
    const auto error = static_cast<int>(GetLastError());
    throw Error("[emulator] cannot load the library: " + std::system_category().message(error));
  }
  const auto get = reinterpret_cast<aie_host::GetKernelTable>(
      reinterpret_cast<void*>(GetProcAddress(library, aie_host::kGetKernelTable)));
  if (get == nullptr) {
    throw Error(std::string("[emulator] the library exports no ") + aie_host::kGetKernelTable);
  }
  return *get();
}

}  // namespace flownpu::emulator
