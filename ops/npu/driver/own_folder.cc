// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/driver/own_folder.h"

#include <dlfcn.h>

#include <system_error>

namespace flownpu::npu {

std::filesystem::path own_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&own_folder), &info) == 0 || info.dli_fname == nullptr)
    return {};
  std::error_code ignored;
  return std::filesystem::absolute(info.dli_fname, ignored).parent_path();
}

}  // namespace flownpu::npu
