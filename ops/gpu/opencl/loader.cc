// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/opencl/loader.h"

#include <cstdlib>

#include "ops/gpu/context/loaded_api.h"
#include "ops/gpu/opencl/status.h"
#include "ops/system/library.h"

namespace flownpu::gpu {
namespace {

[[noreturn]] void refuse(const std::string& reason) {
  throw GpuError(Failure::kNoLoader, "[FlowNPU] device 'gpu': " + reason);
}

void* open(const std::string& file) {
  std::string reasons;
  if (!file.empty()) {
    if (void* library = open_library({file}, reasons); library != nullptr) return library;
    refuse("expected an OpenCL loader in " + file + " (" + reasons +
           "); set FLOWNPU_OPENCL to the file of one, or unset it");
  }
  // Linux has the second name from development packages.
  void* library = open_library({"libOpenCL.so.1", "libOpenCL.so", "OpenCL.dll"}, reasons);
  if (library != nullptr) return library;
  refuse("OpenCL's loader is not installed (" + reasons +
         "); `flownpu doctor` names the command that installs it, or set FLOWNPU_OPENCL to the "
         "file of one");
}

LoadedApi<cl::Functions>& loaded() {
  static LoadedApi<cl::Functions> api([] { return load_opencl(""); });
  return api;
}

}  // namespace

cl::Functions load_opencl(const std::string& file) {
  const char* given = std::getenv(kLoaderVariable);
  const std::string chosen = file.empty() && given != nullptr ? given : file;
  void* library = open(chosen);
  cl::Functions functions;
  const auto find = [&](const char* name) {
    void* symbol = find_symbol(library, name);
    if (symbol == nullptr)
      refuse("expected OpenCL 1.2 or newer, and its loader " + chosen + " has no " + name +
             "; `flownpu doctor` names the command that installs one");
    return symbol;
  };
#define FLOWNPU_OPENCL_LOAD(result, name, parameters) \
  functions.name = reinterpret_cast<decltype(functions.name)>(find(#name));
  FLOWNPU_OPENCL_FUNCTIONS(FLOWNPU_OPENCL_LOAD)
#undef FLOWNPU_OPENCL_LOAD
  return functions;
}

bool opencl_is_parents() { return loaded().is_parents(); }
void check_opencl_is_own() { loaded().check_own(); }
const cl::Functions& opencl() { return loaded().functions(); }

}  // namespace flownpu::gpu
