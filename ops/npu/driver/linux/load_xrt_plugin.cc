// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>

#include <filesystem>

#include "ops/npu/driver/runtime.h"
#include "ops/npu/driver/xrt_plugin.h"
#include "ops/system/library.h"

namespace flownpu::npu {
namespace {

[[noreturn]] void refuse(const std::string& reason) {
  fail_device(Failure::kVersion, "device 'npu': ", reason);
}

// Says why the loader refused an existing plugin. Only the loader's text distinguishes a missing
// library, whose name it begins with, from a missing symbol.
[[noreturn]] void refuse_as_loader(const std::string& text) {
  if (const std::size_t end = text.find(": cannot open shared object file");
      end != std::string::npos) {
    const std::string library = text.substr(0, end);
    const std::string missing =
        library.rfind("libxrt", 0) == 0 ? "XRT is not installed" : "XRT needs a library more";
    refuse(missing + " (" + text + "); " + kInstallXrt +
           ", or the setup.sh to source where XRT is at another place");
  }
  refuse("the installed XRT does not fit this build (" + text +
         "); install XRT 2.19 or newer, or build FlowNPU with the installed one: `flownpu doctor` "
         "names the command");
}

}  // namespace

void require_npu_system() {}

const xrt_abi::Table& load_xrt_plugin(std::string file) {
  if (file.empty()) file = (own_folder() / library_file(kXrtPlugin)).string();
  if (!std::filesystem::exists(file)) {
    refuse("this build of FlowNPU has no " + file +
           ": it was built without XRT's headers; `flownpu doctor` names the commands that install "
           "them and build it again, or use device = cpu");
  }
  void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* error = dlerror();
    refuse_as_loader(error == nullptr ? "no reason given" : error);
  }
  const auto get_table = reinterpret_cast<xrt_abi::GetTable>(dlsym(library, xrt_abi::kGetTable));
  if (get_table == nullptr) refuse(file + " is no plugin of FlowNPU; install FlowNPU again");
  const xrt_abi::Table* table = get_table();
  if (table == nullptr || table->version != xrt_abi::kVersion) {
    refuse(file + " is of another version of FlowNPU; install FlowNPU again");
  }
  return *table;
}

}  // namespace flownpu::npu
