// SPDX-License-Identifier: Apache-2.0
// Twins: the device's copies of the host's memory in which a session's values live. A value that
// one kernel writes and the next reads stays in the twin; the host's memory is then only its name,
// and pages of it that nobody touches take no room.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <span>

#include "ops/gpu/context/context.h"
#include "ops/nodes/tensor.h"

namespace flownpu::gpu {

struct Twin {
  std::size_t bytes = 0;
  Buffer buffer;  // allocated when a kernel first needs it
  // The sides that have the value.
  bool on_host = true;
  bool on_device = false;
};

// Several threads may use it at once; a twin belongs to the run that has its memory.
class Twins {
 public:
  void add(const void* host, std::size_t bytes);
  void remove(const void* host);
  // The twin of the memory that begins there; null if it has none.
  Twin* find(const void* host);

  // Before the host reads, or after it has written, these tensors. The first waits for the device
  // if a value is only there, and locks the context's mutex for it.
  void to_host(Context& context, std::span<const Tensor> tensors);
  void written_by_host(std::span<const Tensor> tensors);

 private:
  std::mutex mutex_;
  std::map<const void*, Twin> twins_;
};

}  // namespace flownpu::gpu
