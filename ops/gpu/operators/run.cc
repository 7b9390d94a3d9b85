// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/operators/run.h"

#include <limits>
#include <vector>

#include "ops/error.h"

namespace flownpu::gpu {

void check_bytes(std::size_t bytes, std::string_view what) {
  constexpr std::size_t kMost = std::numeric_limits<std::int32_t>::max();
  if (bytes > kMost)
    fail("[FlowNPU] device 'gpu': expected ", what, " of at most ", kMost,
         " bytes, which its kernels' indices count, got ", bytes, ": use device = cpu");
}

Element element_of(DataType type) {
  switch (type) {
    case DataType::kFloat32:
      return Element::kFloat32;
    case DataType::kFloat16:
      return Element::kFloat16;
    case DataType::kBFloat16:
      return Element::kBFloat16;
    case DataType::kInt8:
      return Element::kInt8;
    default:
      fail("[FlowNPU] device 'gpu': expected values in float, float16, bfloat16 or int8, got ",
           name_of(type), ": use device = cpu");
  }
}

Element element_of_cache(DataType type) {
  return type == DataType::kInt8 ? Element::kInt8Rows : element_of(type);
}

Buffer upload(Context& context, const Value& constant) {
  const std::size_t bytes = constant.bytes();
  check_bytes(bytes, "a weight");
  const std::lock_guard lock(context.mutex());
  Buffer buffer = context.allocate(bytes);
  context.write(buffer, {static_cast<const std::byte*>(constant.constant), bytes});
  return buffer;
}

const Buffer* Run::input(std::span<const std::byte> content) {
  const Buffer* buffer = output(content.size());
  context_.write(*buffer, content);
  return buffer;
}

const Buffer* Run::input(const Tensor& tensor) {
  const std::span content(static_cast<const std::byte*>(tensor.data), tensor.bytes());
  Twin* twin = context_.twins().find(tensor.data);
  if (twin == nullptr) return input(content);
  const Buffer* buffer = buffer_of(*twin);
  if (!twin->on_device) context_.write(*buffer, content);
  twin->on_device = true;
  return buffer;
}

const Buffer* Run::buffer_of(Twin& twin) {
  if (twin.buffer.handle() == nullptr) {
    check_bytes(twin.bytes, "a tensor");
    twin.buffer = context_.allocate(twin.bytes);
  }
  return &twin.buffer;
}

const Buffer* Run::output(const Tensor& tensor) {
  Twin* twin = context_.twins().find(tensor.data);
  if (twin == nullptr) return output(tensor.bytes());
  twin->on_device = true;
  twin->on_host = false;
  return buffer_of(*twin);
}

const Buffer* Run::output(std::size_t bytes) {
  check_bytes(bytes, "a tensor");
  buffers_.push_back(context_.allocate(bytes));
  return &buffers_.back();
}

void Run::launch(const KernelDescription& kernel, const Grid& grid,
                 std::initializer_list<const Buffer*> buffers,
                 std::initializer_list<std::int64_t> parameters) {
  launch(kernel, grid, std::span(buffers.begin(), buffers.size()),
         std::span(parameters.begin(), parameters.size()));
}

void Run::launch(const KernelDescription& kernel, const Grid& grid,
                 std::span<const Buffer* const> buffers, std::span<const std::int64_t> parameters) {
  if (buffers.size() != kernel.arguments().size() ||
      parameters.size() != kernel.parameters.size() || grid.lanes != kernel.lanes) {
    fail("[kernel ", kernel.name, "] expected ", kernel.arguments().size(), " buffers, ",
         kernel.parameters.size(), " parameters and ", kernel.lanes, " lanes, got ", buffers.size(),
         ", ", parameters.size(), " and ", grid.lanes);
  }
  launch(*context_.compile(kernel), grid, buffers, parameters);
}

void Run::launch(const CompiledKernel& kernel, const Grid& grid,
                 std::span<const Buffer* const> buffers, std::span<const std::int64_t> parameters) {
  std::vector<KernelArgument> arguments(buffers.begin(), buffers.end());
  for (const std::int64_t parameter : parameters)
    arguments.emplace_back(static_cast<std::int32_t>(parameter));
  context_.launch(kernel, arguments, grid);
}

void Run::read(const Buffer* from, const Tensor& to) {
  const Twin* twin = context_.twins().find(to.data);
  if (twin != nullptr && from == &twin->buffer) return;
  read(from, std::span(static_cast<std::byte*>(to.data), to.bytes()));
}

}  // namespace flownpu::gpu
