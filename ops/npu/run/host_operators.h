// SPDX-License-Identifier: Apache-2.0
// HostOperator: a step of a program that the host computes, because a change of array would take
// longer than the work (aie/programs/host.py, which has their equations and arguments).
//
// They compute with the CPU device's kernels and threads, in f32, on the host's copies of buffers:
// what an array wrote is moved here first, what an array will read is moved there afterwards, and
// nothing else is. Rows that only fill a chunk are neither computed nor moved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ops/cpu/kernels.h"
#include "ops/cpu/thread_pool.h"
#include "ops/npu/artifacts/program_record.h"
#include "ops/npu/driver/runtime.h"

namespace flownpu::npu {

// What computes them.
struct HostCompute {
  const cpu::Kernels* kernels;
  std::shared_ptr<cpu::ThreadPool> pool;
};

class HostOperator {
 public:
  virtual ~HostOperator() = default;
  // `arguments`: as many bytes of each as the record says. For the first `rows` of those that the
  // record says, or all if it has fewer; the first is at `position`. One run follows another.
  // Throws Error if rows would lie past a buffer's end; DeviceError.
  virtual void run(const HostCompute& compute, std::span<const View> arguments,
                   std::int64_t position, std::size_t rows) = 0;
};

// `label`: for messages. Throws Error unless there is an operator of this stem, with the parameters
// and the buffers' sizes that it takes.
std::unique_ptr<HostOperator> make_host_operator(const HostCallRecord& record,
                                                 const std::string& label);

}  // namespace flownpu::npu
