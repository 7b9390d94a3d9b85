// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/opencl/status.h"

#include <algorithm>
#include <array>
#include <sstream>
#include <utility>

namespace flownpu::gpu {
namespace {

struct Code {
  cl::Int number;
  std::string_view name;
};

// Codes of OpenCL 1.2 and of the ICD loader that our calls can end with.
constexpr std::array<Code, 44> kCodes{{
    {-1, "CL_DEVICE_NOT_FOUND"},
    {-2, "CL_DEVICE_NOT_AVAILABLE"},
    {-3, "CL_COMPILER_NOT_AVAILABLE"},
    {-4, "CL_MEM_OBJECT_ALLOCATION_FAILURE"},
    {-5, "CL_OUT_OF_RESOURCES"},
    {-6, "CL_OUT_OF_HOST_MEMORY"},
    {-7, "CL_PROFILING_INFO_NOT_AVAILABLE"},
    {-10, "CL_IMAGE_FORMAT_NOT_SUPPORTED"},
    {-11, "CL_BUILD_PROGRAM_FAILURE"},
    {-13, "CL_MISALIGNED_SUB_BUFFER_OFFSET"},
    {-14, "CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST"},
    {-30, "CL_INVALID_VALUE"},
    {-31, "CL_INVALID_DEVICE_TYPE"},
    {-32, "CL_INVALID_PLATFORM"},
    {-33, "CL_INVALID_DEVICE"},
    {-34, "CL_INVALID_CONTEXT"},
    {-35, "CL_INVALID_QUEUE_PROPERTIES"},
    {-36, "CL_INVALID_COMMAND_QUEUE"},
    {-37, "CL_INVALID_HOST_PTR"},
    {-38, "CL_INVALID_MEM_OBJECT"},
    {-39, "CL_INVALID_IMAGE_FORMAT_DESCRIPTOR"},
    {-40, "CL_INVALID_IMAGE_SIZE"},
    {-42, "CL_INVALID_BINARY"},
    {-43, "CL_INVALID_BUILD_OPTIONS"},
    {-44, "CL_INVALID_PROGRAM"},
    {-45, "CL_INVALID_PROGRAM_EXECUTABLE"},
    {-46, "CL_INVALID_KERNEL_NAME"},
    {-47, "CL_INVALID_KERNEL_DEFINITION"},
    {-48, "CL_INVALID_KERNEL"},
    {-49, "CL_INVALID_ARG_INDEX"},
    {-50, "CL_INVALID_ARG_VALUE"},
    {-51, "CL_INVALID_ARG_SIZE"},
    {-52, "CL_INVALID_KERNEL_ARGS"},
    {-53, "CL_INVALID_WORK_DIMENSION"},
    {-54, "CL_INVALID_WORK_GROUP_SIZE"},
    {-55, "CL_INVALID_WORK_ITEM_SIZE"},
    {-56, "CL_INVALID_GLOBAL_OFFSET"},
    {-57, "CL_INVALID_EVENT_WAIT_LIST"},
    {-58, "CL_INVALID_EVENT"},
    {-59, "CL_INVALID_OPERATION"},
    {-61, "CL_INVALID_BUFFER_SIZE"},
    {-63, "CL_INVALID_GLOBAL_WORK_SIZE"},
    {-65, "CL_INVALID_IMAGE_DESCRIPTOR"},
    {-1001, "CL_PLATFORM_NOT_FOUND_KHR"},
}};

struct Meaning {
  Failure failure;
  std::string_view advice;
};

Meaning meaning_of(cl::Int code) {
  switch (code) {
    case -4:
    case -6:
    case -61:
      return {Failure::kMemory, "use smaller inputs, or close other programs that use the GPU"};
    case -5:
      return {Failure::kCommand,
              "the device ran out of memory, registers or time: use smaller inputs, close other "
              "programs that use the GPU, and see `sudo dmesg`"};
    case -3:
    case -11:
    case -44:
    case -45:
      return {Failure::kProgram,
              "the driver's compiler refused a kernel: `flownpu selftest --device gpu` shows which "
              "kernels it takes; update the driver, or use device = cpu"};
    case -10:
    case -39:
    case -40:
    case -65:
      return {Failure::kCommand,
              "the driver does not make images of memory: set the option gpu_weights to buffer"};
    case -1001:
      return {Failure::kNoPlatform,
              "no OpenCL implementation is installed: `flownpu doctor` names the command"};
    case -1:
    case -2:
      return {Failure::kNoDevice,
              "`flownpu doctor` shows the OpenCL devices of this machine, and what is missing"};
    default:
      return {Failure::kCommand,
              "`flownpu selftest --device gpu` shows whether this driver computes rightly; use "
              "device = cpu until then"};
  }
}

}  // namespace

std::string name_of_code(cl::Int code) {
  const auto* found =
      std::ranges::find_if(kCodes, [&](const Code& one) { return one.number == code; });
  return found == kCodes.end() ? std::to_string(code) : std::string(found->name);
}

void check(cl::Int code, std::string_view call, std::string_view what, std::string_view details) {
  if (code == 0) return;
  const Meaning meaning = meaning_of(code);
  std::ostringstream message;
  message << "[FlowNPU] device 'gpu': " << what << ": " << call << " ended with "
          << name_of_code(code) << " (" << code << ")";
  if (!details.empty()) message << ": " << details;
  message << "; " << meaning.advice;
  throw GpuError(meaning.failure, message.str());
}

}  // namespace flownpu::gpu
