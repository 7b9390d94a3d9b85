// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/context/twins.h"

namespace flownpu::gpu {

void Twins::add(const void* host, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  twins_[host].bytes = bytes;
}

void Twins::remove(const void* host) {
  const std::lock_guard lock(mutex_);
  twins_.erase(host);
}

Twin* Twins::find(const void* host) {
  const std::lock_guard lock(mutex_);
  const auto found = twins_.find(host);
  return found == twins_.end() ? nullptr : &found->second;
}

void Twins::to_host(Context& context, std::span<const Tensor> tensors) {
  for (const Tensor& tensor : tensors) {
    Twin* twin = find(tensor.data);
    if (twin == nullptr || twin->on_host) continue;
    const std::lock_guard lock(context.mutex());
    context.read(twin->buffer, {tensor.as<std::byte>(), tensor.bytes()});
    twin->on_host = true;
  }
}

void Twins::written_by_host(std::span<const Tensor> tensors) {
  for (const Tensor& tensor : tensors) {
    Twin* twin = find(tensor.data);
    if (twin == nullptr) continue;
    twin->on_host = true;
    twin->on_device = false;
  }
}

}  // namespace flownpu::gpu
