// SPDX-License-Identifier: Apache-2.0
// One run of an operator: the buffers of its inputs and outputs, and the kernels that it launches.
#pragma once

#include <cstddef>
#include <deque>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>

#include "ops/gpu/context/context.h"
#include "ops/gpu/context/observed_run.h"
#include "ops/gpu/context/twins.h"
#include "ops/gpu/language/kernel.h"
#include "ops/nodes/node.h"
#include "ops/nodes/tensor.h"

namespace flownpu::gpu {

// Holds the context's mutex for as long as it lives, and owns its buffers.
class Run {
 public:
  explicit Run(Context& context) : context_(context), lock_(context.mutex()), observed_(context) {}

  // A new buffer with this content. Throws Error for more bytes than 32-bit indices reach.
  const Buffer* input(std::span<const std::byte> content);
  // The twin of the tensor's memory (twins.h), which gets its content unless it has it; a new
  // buffer for memory without a twin. Throws as above.
  const Buffer* input(const Tensor& tensor);
  template <typename Number>
  const Buffer* input(std::span<const Number> content) {
    return input(std::as_bytes(content));
  }
  // A new buffer for kernels to write, or the twin of a tensor that they write. Throws as input()
  // does.
  const Buffer* output(std::size_t bytes);
  const Buffer* output(const Tensor& tensor);

  // Compiles the kernel if need be, and enqueues it. Buffers are in the order of
  // KernelDescription::arguments(), parameters in that of its parameters. Throws Error unless their
  // numbers fit.
  void launch(const KernelDescription& kernel, const Grid& grid,
              std::initializer_list<const Buffer*> buffers,
              std::initializer_list<std::int64_t> parameters = {});
  void launch(const KernelDescription& kernel, const Grid& grid,
              std::span<const Buffer* const> buffers, std::span<const std::int64_t> parameters);

  // The same for a kernel that is compiled already, and whose arguments are known to fit.
  void launch(const CompiledKernel& kernel, const Grid& grid,
              std::span<const Buffer* const> buffers, std::span<const std::int64_t> parameters);

  // Waits for the kernels, then copies to the host; nothing for a tensor whose twin this is.
  void read(const Buffer* from, const Tensor& to);
  void read(const Buffer* from, std::span<std::byte> to) { context_.read(*from, to); }

 private:
  const Buffer* buffer_of(Twin& twin);

  Context& context_;
  std::lock_guard<std::mutex> lock_;
  ObservedRun observed_;
  std::deque<Buffer> buffers_;  // a deque, which does not move them
};

// The element of the kernel language for values of this type, which are floats or int8. Throws
// Error for other types.
Element element_of(DataType type);
// The element for values of a KV cache, where each int8 row has a scale.
Element element_of_cache(DataType type);

// A constant's bytes in a buffer. Throws as check_bytes does.
Buffer upload(Context& context, const Value& constant);

// Throws Error if a 32-bit integer cannot count the bytes; `what`: what they are, for the message.
void check_bytes(std::size_t bytes, std::string_view what);

}  // namespace flownpu::gpu
