// SPDX-License-Identifier: Apache-2.0
// Arrays, the instructions of their calls, and dispatches, over XRT.
//
// Uses of XRT that would end the process or corrupt memory, and how they are avoided:
// - XRT ends the process if a run is destroyed while it is under way. So a dispatch that has not
//   ended is not destroyed but abandoned, until it is found to have ended.
// - A run does not keep its buffers. So the dispatch keeps them.
// - xrt::run::abort() waits without a limit for a command that NPUs do not have. So a call that
//   does not end is left to the driver's watchdog.
// - XRT's own waits cannot be relied on (waiting.h). So the call's state is polled.
#pragma once

#include <xrt/experimental/xrt_kernel.h>
#include <xrt/xrt_bo.h>
#include <xrt/xrt_device.h>
#include <xrt/xrt_hw_context.h>
#include <xrt/xrt_kernel.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "ops/npu/driver/xrt_abi.h"
#include "ops/npu/xrt/waiting.h"

namespace flownpu::npu::xrt_abi {

// An xclbin's array in a hardware context of its own. Members are destroyed in reverse order: the
// kernel before its context.
struct Context {
  Context(const xrt::device& opened, const std::string& file);

  xrt::device device;
  xrt::hw_context context;
  xrt::kernel kernel;
  // The most buffers of a call of the kernel. XRT does not check the number, and would crash on
  // more.
  std::size_t most_buffers = 0;
};

// The words of a call, in a buffer that the controller reads.
class Instructions {
 public:
  Instructions(const Context& context, const std::uint32_t* words, std::size_t count);

  void write(std::size_t word, std::uint32_t value);
  // Moves the words that were written to the device, and returns how many bytes that were.
  std::size_t flush();

  const xrt::bo& buffer() const { return buffer_; }
  std::uint32_t count() const { return count_; }
  // The durations of dispatches whose first call has these instructions.
  Expectation& expectation() { return expectation_; }

 private:
  xrt::bo buffer_;
  std::uint32_t* words_;
  std::uint32_t count_;
  // The words that the device does not have yet: first .. last - 1.
  std::size_t first_ = 0;
  std::size_t last_;
  Expectation expectation_;
};

struct Array {
  std::shared_ptr<Context> context;
};

// The instructions are shared with dispatches that are under way.
struct Sequence {
  std::shared_ptr<Instructions> instructions;
};

struct Buffer {
  xrt::bo buffer;
};

// `Table::run` of driver/xrt_abi.h.
Status run(Array* array, const Call* calls, std::size_t count, std::uint32_t milliseconds,
           Outcome* outcome, Text error) noexcept;
// Frees the abandoned dispatches that have ended by now.
void free_abandoned() noexcept;

}  // namespace flownpu::npu::xrt_abi
