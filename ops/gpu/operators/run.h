// SPDX-License-Identifier: Apache-2.0
// One run of an operator: buffers of its inputs and outputs, and the kernels that are launched.
#pragma once

#include <cstddef>
#include <deque>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>

#include "ops/gpu/language/kernel.h"
#include "ops/gpu/opencl/context.h"
#include "ops/gpu/opencl/observed_run.h"
#include "ops/nodes/node.h"
#include "ops/nodes/tensor.h"

namespace flownpu::gpu {

// Has the context to itself for as long as it lives; its buffers go with it.
class Run {
 public:
  explicit Run(Context& context) : context_(context), lock_(context.mutex()), observed_(context) {}

  // A buffer with this content. Throws Error for more bytes than 32-bit indices reach.
  const Buffer* input(std::span<const std::byte> content);
  const Buffer* input(const Tensor& tensor);
  template <typename Number>
  const Buffer* input(std::span<const Number> content) {
    return input(std::as_bytes(content));
  }
  // A buffer to be written.
  const Buffer* output(std::size_t bytes);

  // Buffers in the order of KernelDescription::arguments(), then its parameters.
  void launch(const KernelDescription& kernel, const Grid& grid,
              std::initializer_list<const Buffer*> buffers,
              std::initializer_list<std::int64_t> parameters = {});
  void launch(const KernelDescription& kernel, const Grid& grid,
              std::span<const Buffer* const> buffers, std::span<const std::int64_t> parameters);

  // Waits for what was launched.
  void read(const Buffer* from, const Tensor& to);
  void read(const Buffer* from, std::span<std::byte> to) { context_.read(*from, to); }

 private:
  Context& context_;
  std::lock_guard<std::mutex> lock_;
  ObservedRun observed_;
  std::deque<Buffer> buffers_;  // does not move them
};

// How kernels read values of this type; there are floats, and int8. Throws Error for others.
Element element_of(DataType type);
// The same of a KV cache, whose int8 has a scale in each row.
Element element_of_cache(DataType type);

// A constant's bytes in a buffer. Throws as check_bytes does.
Buffer upload(Context& context, const Value& constant);

// Throws Error unless 32-bit integers count the bytes; `what`: whose they are.
void check_bytes(std::size_t bytes, std::string_view what);

}  // namespace flownpu::gpu
