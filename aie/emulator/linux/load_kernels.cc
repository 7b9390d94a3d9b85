// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>

#include "aie/emulator/emulator.h"

namespace flownpu::emulator {

const aie_host::KernelTable& load_kernels(const std::filesystem::path& path) {
  // RTLD_LOCAL: the other architecture's library has functions of the same names.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw Error(std::string("[emulator] ") + dlerror());
  const auto get =
      reinterpret_cast<aie_host::GetKernelTable>(dlsym(library, aie_host::kGetKernelTable));
  if (get == nullptr) {
    throw Error("[emulator] " + path.string() + " exports no " + aie_host::kGetKernelTable);
  }
  return *get();
}

}  // namespace flownpu::emulator
