// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/opencl/loader.h"

#include "ops/gpu/opencl/status.h"

namespace flownpu::gpu {

cl::Functions load_opencl(const std::string& /*file*/) {
  throw GpuError(Failure::kNoLoader,
                 "[FlowNPU] device 'gpu': expected Linux, got Windows, where FlowNPU does not "
                 "load OpenCL yet; use device = cpu");
}

const cl::Functions& opencl() {
  static const cl::Functions loaded = load_opencl("");
  return loaded;
}

bool opencl_is_parents() { return false; }

void check_opencl_is_own() {}

}  // namespace flownpu::gpu
