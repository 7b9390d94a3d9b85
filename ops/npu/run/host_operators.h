// SPDX-License-Identifier: Apache-2.0
// HostOperator: a step of a program that the host computes, because a change of array would take
// longer than the work. aie/programs/host.py has the equations and arguments.
//
// It computes with the CPU device's kernels and threads, in f32, on the host's copies of buffers.
// Only an array's results are moved to the host before, and only an array's inputs are moved to the
// array afterwards. Rows that only fill a chunk are neither computed nor moved.
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

class LayerExperts;
class LayerStates;

// The kernels and threads that compute them.
struct HostCompute {
  const cpu::Kernels* kernels;
  std::shared_ptr<cpu::ThreadPool> pool;
  // Routers and experts of a decoder's layers; null: there are none.
  std::shared_ptr<const LayerExperts> experts = nullptr;
  // The mixers of layers that keep states; null: there are none.
  std::shared_ptr<LayerStates> states = nullptr;
};

class HostOperator {
 public:
  virtual ~HostOperator() = default;
  // Computes the first `rows` rows, but no more than the record has. `arguments`: each of as many
  // bytes as the record says. `position`: that of the first row. Not to be called by two threads at
  // once. Throws Error if rows would lie beyond a buffer's end; DeviceError.
  virtual void run(const HostCompute& compute, std::span<const View> arguments,
                   std::int64_t position, std::size_t rows) = 0;
};

// `label`: for messages. Throws Error unless an operator has this record's op_type, and the record
// has this operator's parameters and sizes of buffers.
std::unique_ptr<HostOperator> make_host_operator(const HostCallRecord& record,
                                                 const std::string& label);

}  // namespace flownpu::npu
