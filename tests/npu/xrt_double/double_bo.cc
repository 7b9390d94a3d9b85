// SPDX-License-Identifier: Apache-2.0
// Buffers.
#include <xrt/experimental/xrt_ext.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <system_error>

#include "tests/npu/xrt_double/double_objects.h"

namespace xrt {
namespace {

constexpr std::size_t kPage = 4096;
// What nobody has written is not zero.
constexpr int kGarbage = 0xA5;

[[noreturn]] void refuse(int number, const std::string& what) {
  throw std::system_error(number, std::generic_category(), what);
}

std::byte* allocate(std::size_t bytes) {
  void* memory = std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage);
  if (memory == nullptr) refuse(ENOMEM, "no memory");
  std::memset(memory, kGarbage, bytes);
  return static_cast<std::byte*>(memory);
}

}  // namespace

bo_impl::bo_impl(std::shared_ptr<xrt_core::device> device, std::size_t size, bo::flags flags,
                 memory_group group)
    : alive_("buffer"), device_(std::move(device)), size_(size), flags_(flags), group_(group) {
  device_double::throw_if_struck("allocate", "DRM_IOCTL_AMDXDNA_CREATE_BO IOCTL failed");
  if (size == 0) refuse(EINVAL, "a buffer of nothing");
  // More than a machine has that runs tests.
  constexpr std::size_t kMost = std::size_t{1} << 40U;
  if (size > kMost) refuse(ENOMEM, "no memory");
  if (flags != bo::flags::host_only && flags != bo::flags::cacheable) {
    refuse(ENOTSUP, "unsupported buffer type");
  }
  host_ = allocate(size);
  device_copy_ = allocate(size);
}

bo_impl::bo_impl(std::shared_ptr<bo_impl> parent, std::size_t size, std::size_t offset)
    : alive_("part of a buffer"), parent_(std::move(parent)), size_(size), offset_(offset) {
  if (offset > parent_->size() || size > parent_->size() - offset) {
    refuse(EINVAL, "sub buffer size and offset");
  }
}

bo_impl::~bo_impl() {
  if (users_ != 0) device_double::violate("a buffer was freed that a call under way uses");
  std::free(host_);
  std::free(device_copy_);
}

bo::bo(const device& device, std::size_t size, bo::flags flags, memory_group group)
    : handle(std::make_shared<bo_impl>(device.get_handle(), size, flags, group)) {}

bo::bo(const bo& parent, std::size_t size, std::size_t offset)
    : handle(std::make_shared<bo_impl>(parent.handle, size, offset)) {}

bo::~bo() = default;

std::size_t bo::size() const { return handle->size(); }

void* bo::map() { return handle->host(); }

void bo::sync(xclBOSyncDirection direction, std::size_t size, std::size_t offset) {
  device_double::throw_if_struck("move", "DRM_IOCTL_AMDXDNA_SYNC_BO IOCTL failed");
  if (offset > handle->size() || size > handle->size() - offset) {
    refuse(EINVAL, "Invalid BO offset and size for sync'ing");
  }
  // What a call that hangs leaves is all there is to go on with.
  const bool is_rescue =
      direction == XCL_BO_SYNC_BO_FROM_DEVICE && handle->users() == handle->hanging();
  if (handle->users() != 0 && !is_rescue) {
    device_double::violate("a buffer was moved that a call under way uses");
  }
  std::byte* const host = handle->host() + offset;
  std::byte* const device = handle->on_device().data() + offset;
  if (direction == XCL_BO_SYNC_BO_TO_DEVICE) {
    std::memcpy(device, host, size);
  } else if (direction == XCL_BO_SYNC_BO_FROM_DEVICE) {
    std::memcpy(host, device, size);
  } else {
    device_double::violate("a buffer was moved in a direction that NPUs do not have");
  }
}

ext::bo::bo(const device& device, std::size_t size)
    : xrt::bo(device, size, xrt::bo::flags::host_only, 0) {}

}  // namespace xrt
