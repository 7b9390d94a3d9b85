// SPDX-License-Identifier: Apache-2.0
// The part of OpenCL 1.2's C interface that FlowNPU calls. It is declared here so that building and
// installing need nothing of OpenCL. Numbers are those of Khronos' registry (cl.xml); a test
// compares them with pyopencl's.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flownpu::gpu::cl {

using Int = std::int32_t;
using UInt = std::uint32_t;
using Bits = std::uint64_t;

// Opaque handles of the implementation's objects.
using Platform = struct PlatformOfOpenCl*;
using DeviceId = struct DeviceOfOpenCl*;
using Context = struct ContextOfOpenCl*;
using Queue = struct QueueOfOpenCl*;
using Memory = struct MemoryOfOpenCl*;
using Program = struct ProgramOfOpenCl*;
using Kernel = struct KernelOfOpenCl*;
using Event = struct EventOfOpenCl*;

// Names of properties of platforms, devices, programs, kernels and events (clGet...Info); types of
// devices; flags and formats of queues, memory and images.
inline constexpr UInt kPlatformVersion = 0x0901;
inline constexpr UInt kPlatformName = 0x0902;
inline constexpr Bits kEveryType = 0xFFFFFFFF;
inline constexpr Bits kTypeCpu = 1U << 1;
inline constexpr Bits kTypeGpu = 1U << 2;
inline constexpr UInt kDeviceType = 0x1000;
inline constexpr UInt kDeviceComputeUnits = 0x1002;
inline constexpr UInt kDeviceWorkGroupSize = 0x1004;
inline constexpr UInt kDeviceAllocation = 0x1010;
inline constexpr UInt kDeviceImages = 0x1016;
inline constexpr UInt kDeviceMemory = 0x101F;
inline constexpr UInt kDeviceLocalMemory = 0x1023;
inline constexpr UInt kDeviceAvailable = 0x1027;
inline constexpr UInt kDeviceCompiler = 0x1028;
inline constexpr UInt kDeviceName = 0x102B;
inline constexpr UInt kDeviceVendor = 0x102C;
inline constexpr UInt kDriverVersion = 0x102D;
inline constexpr UInt kDeviceVersion = 0x102F;
inline constexpr UInt kDeviceExtensions = 0x1030;
inline constexpr UInt kDeviceUnifiedMemory = 0x1035;
inline constexpr UInt kDeviceTexels = 0x1040;
inline constexpr Bits kProfiling = 1U << 1;
inline constexpr Bits kReadWrite = 1U << 0;
inline constexpr Bits kReadOnly = 1U << 2;
inline constexpr Bits kUseHostMemory = 1U << 3;
inline constexpr UInt kRgba = 0x10B5;
inline constexpr UInt kUnsigned32 = 0x10DC;
inline constexpr UInt kImageOfBuffer = 0x10F6;
inline constexpr UInt kProgramBinarySizes = 0x1165;
inline constexpr UInt kProgramBinaries = 0x1166;
inline constexpr UInt kBuildLog = 0x1183;
inline constexpr UInt kEventStatus = 0x11D3;
inline constexpr UInt kEventQueued = 0x1280;
inline constexpr UInt kEventStart = 0x1282;
inline constexpr UInt kEventEnd = 0x1283;
inline constexpr std::intptr_t kContextPlatform = 0x1084;
inline constexpr UInt kTrue = 1;

// cl_image_format and cl_image_desc. An image of memory has only a type, a width in texels, and the
// buffer.
struct ImageFormat {
  UInt order = kRgba;
  UInt type = kUnsigned32;
};
struct ImageDescription {
  UInt type = kImageOfBuffer;
  std::size_t width = 0;
  std::size_t height = 0;
  std::size_t depth = 0;
  std::size_t array_size = 0;
  std::size_t row_pitch = 0;
  std::size_t slice_pitch = 0;
  UInt mip_levels = 0;
  UInt samples = 0;
  Memory buffer = nullptr;
};

// How far a command has come; a negative number is the error that it ended with.
inline constexpr Int kComplete = 0;

// The functions of the ICD loader, by the names it exports: X(result, name, parameters).
// clCreateCommandQueue is deprecated since 2.0, but later versions keep it, and it needs no list of
// properties.
#define FLOWNPU_OPENCL_FUNCTIONS(X)                                                              \
  X(Int, clGetPlatformIDs, (UInt, Platform*, UInt*))                                             \
  X(Int, clGetPlatformInfo, (Platform, UInt, std::size_t, void*, std::size_t*))                  \
  X(Int, clGetDeviceIDs, (Platform, Bits, UInt, DeviceId*, UInt*))                               \
  X(Int, clGetDeviceInfo, (DeviceId, UInt, std::size_t, void*, std::size_t*))                    \
  X(Context, clCreateContext,                                                                    \
    (const std::intptr_t*, UInt, const DeviceId*,                                                \
     void (*)(const char*, const void*, std::size_t, void*), void*, Int*))                       \
  X(Int, clReleaseContext, (Context))                                                            \
  X(Queue, clCreateCommandQueue, (Context, DeviceId, Bits, Int*))                                \
  X(Int, clReleaseCommandQueue, (Queue))                                                         \
  X(Int, clFlush, (Queue))                                                                       \
  X(Memory, clCreateBuffer, (Context, Bits, std::size_t, void*, Int*))                           \
  X(Memory, clCreateImage,                                                                       \
    (Context, Bits, const ImageFormat*, const ImageDescription*, void*, Int*))                   \
  X(Int, clReleaseMemObject, (Memory))                                                           \
  X(Int, clEnqueueReadBuffer,                                                                    \
    (Queue, Memory, UInt, std::size_t, std::size_t, void*, UInt, const Event*, Event*))          \
  X(Int, clEnqueueWriteBuffer,                                                                   \
    (Queue, Memory, UInt, std::size_t, std::size_t, const void*, UInt, const Event*, Event*))    \
  X(Int, clEnqueueCopyBuffer,                                                                    \
    (Queue, Memory, Memory, std::size_t, std::size_t, std::size_t, UInt, const Event*, Event*))  \
  X(Program, clCreateProgramWithSource, (Context, UInt, const char**, const std::size_t*, Int*)) \
  X(Program, clCreateProgramWithBinary,                                                          \
    (Context, UInt, const DeviceId*, const std::size_t*, const unsigned char**, Int*, Int*))     \
  X(Int, clBuildProgram,                                                                         \
    (Program, UInt, const DeviceId*, const char*, void (*)(Program, void*), void*))              \
  X(Int, clGetProgramInfo, (Program, UInt, std::size_t, void*, std::size_t*))                    \
  X(Int, clGetProgramBuildInfo, (Program, DeviceId, UInt, std::size_t, void*, std::size_t*))     \
  X(Int, clReleaseProgram, (Program))                                                            \
  X(Kernel, clCreateKernel, (Program, const char*, Int*))                                        \
  X(Int, clReleaseKernel, (Kernel))                                                              \
  X(Int, clSetKernelArg, (Kernel, UInt, std::size_t, const void*))                               \
  X(Int, clEnqueueNDRangeKernel,                                                                 \
    (Queue, Kernel, UInt, const std::size_t*, const std::size_t*, const std::size_t*, UInt,      \
     const Event*, Event*))                                                                      \
  X(Int, clEnqueueMarkerWithWaitList, (Queue, UInt, const Event*, Event*))                       \
  X(Int, clGetEventInfo, (Event, UInt, std::size_t, void*, std::size_t*))                        \
  X(Int, clGetEventProfilingInfo, (Event, UInt, std::size_t, void*, std::size_t*))               \
  X(Int, clReleaseEvent, (Event))

// Pointers to these functions, once they are loaded (opencl/loader.h).
struct Functions {
  // NOLINTNEXTLINE(bugprone-macro-parentheses): these are parts of a declaration.
#define FLOWNPU_OPENCL_POINTER(result, name, parameters) result(*name) parameters = nullptr;
  FLOWNPU_OPENCL_FUNCTIONS(FLOWNPU_OPENCL_POINTER)
#undef FLOWNPU_OPENCL_POINTER
};

}  // namespace flownpu::gpu::cl
