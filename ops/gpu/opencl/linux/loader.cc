// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/opencl/loader.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <optional>

#include "ops/gpu/opencl/status.h"
#include "ops/system/forks.h"

namespace flownpu::gpu {
namespace {

// The library's name, and the one that only development packages install.
constexpr std::array<const char*, 2> kNames{"libOpenCL.so.1", "libOpenCL.so"};

[[noreturn]] void refuse(const std::string& reason) {
  throw GpuError(Failure::kNoLoader, "[FlowNPU] device 'gpu': " + reason);
}

std::string last_error() {
  const char* error = dlerror();
  return error == nullptr ? "no reason given" : error;
}

void* open(const std::string& file) {
  if (!file.empty()) {
    void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
      refuse("expected an OpenCL loader in " + file + " (" + last_error() +
             "); set FLOWNPU_OPENCL to the file of one, or unset it");
    return library;
  }
  std::string reasons;
  for (const char* name : kNames) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL); library != nullptr) return library;
    reasons += (reasons.empty() ? "" : "; ") + last_error();
  }
  refuse("OpenCL's loader is not installed (" + reasons +
         "); `flownpu doctor` names the command that installs it, or set FLOWNPU_OPENCL to the "
         "file of one");
}

}  // namespace

cl::Functions load_opencl(const std::string& file) {
  const char* given = std::getenv(kLoaderVariable);
  const std::string chosen = file.empty() && given != nullptr ? given : file;
  void* library = open(chosen);
  cl::Functions functions;
  const auto find = [&](const char* name) {
    void* symbol = dlsym(library, name);
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

namespace {

// The count of forks() of the process that loaded OpenCL.
constexpr std::int64_t kNotLoaded = -1;
std::atomic<std::int64_t> loaded_in{kNotLoaded};

}  // namespace

bool opencl_is_parents() { return loaded_in != kNotLoaded && loaded_in != forks(); }

void check_opencl_is_own() {
  if (opencl_is_parents()) throw GpuError(Failure::kForked, forked_text("gpu"));
}

const cl::Functions& opencl() {
  static std::mutex mutex;
  static std::optional<cl::Functions> loaded;
  check_opencl_is_own();
  const std::lock_guard lock(mutex);
  if (!loaded) {
    loaded = load_opencl("");
    loaded_in = forks();
  }
  return *loaded;
}

}  // namespace flownpu::gpu
