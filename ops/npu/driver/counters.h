// SPDX-License-Identifier: Apache-2.0
// Counts of a runtime, which what it made goes on counting after it is gone.
#pragma once

#include <atomic>
#include <cstdint>

#include "ops/npu/driver/runtime.h"

namespace flownpu::npu {

struct Counters {
  std::atomic<std::uint64_t> dispatches = 0;
  std::atomic<std::uint64_t> calls = 0;
  std::atomic<std::uint64_t> bytes_to_device = 0;
  std::atomic<std::uint64_t> bytes_to_host = 0;
  std::atomic<std::uint64_t> word_bytes = 0;
  std::atomic<std::uint64_t> buffer_bytes = 0;

  Counts read() const {
    return {.dispatches = dispatches,
            .calls = calls,
            .bytes_to_device = bytes_to_device,
            .bytes_to_host = bytes_to_host,
            .word_bytes = word_bytes,
            .buffer_bytes = buffer_bytes};
  }
};

}  // namespace flownpu::npu
