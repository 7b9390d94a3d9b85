// SPDX-License-Identifier: Apache-2.0
// The interface through which a process calls kernels compiled for the host. Kernels of both
// architectures have the same names, so each architecture is a separate shared library, which
// exports one function:
//
//   const flownpu::aie_host::KernelTable* flownpu_aie_kernels();
#pragma once

#include <cstddef>
#include <cstdint>

namespace flownpu::aie_host {

// One parameter of a kernel. `type` is numpy's name of the element: uint8, int32, float32,
// bfloat16; or bfp16ebs8, whose elements are blocks of 8 values in 9 bytes.
struct Parameter {
  const char* type;
  std::size_t element_bytes;
  bool is_buffer;
  bool is_written;
};

// The argument for a parameter: a buffer's memory (`data`, `bytes`), or an int32 (`value`).
struct Argument {
  void* data;
  std::size_t bytes;
  std::int32_t value;
};

struct Kernel {
  const char* name;
  const Parameter* parameters;
  std::size_t parameter_count;
  // Runs the kernel with a core's state as it powers up (rounding: floor). The kernel may access
  // the buffers of `arguments` and nothing else. Returns false, with a message in `error` (cut to
  // `capacity` bytes), if an access is outside of them, misaligned, or writes an input, or if a
  // written buffer overlaps another that does not begin at the same address. Buffers may then be
  // partly written.
  bool (*call)(const Argument* arguments, char* error, std::size_t capacity);
};

struct KernelTable {
  const char* architecture;  // "xdna" or "xdna2"
  const Kernel* kernels;
  std::size_t kernel_count;
};

using GetKernelTable = const KernelTable* (*)();
inline constexpr const char* kGetKernelTable = "flownpu_aie_kernels";

}  // namespace flownpu::aie_host
