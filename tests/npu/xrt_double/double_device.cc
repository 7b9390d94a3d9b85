// SPDX-License-Identifier: Apache-2.0
// Devices, xclbins, hardware contexts and kernels.
#include <xrt/experimental/xrt_system.h>
#include <xrt/experimental/xrt_version.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <system_error>

#include "tests/npu/xrt_double/double_objects.h"

namespace xrt {
namespace {

constexpr unsigned int kVersion = (2U << 16U) + 25U;
constexpr char kMagic[8] = "xclbin2";

// What XRT says of buffers of a kernel's argument: not a small number.
memory_group group_of(int argument) {
  return static_cast<memory_group>((1U << 16U) + static_cast<unsigned int>(argument));
}

std::vector<char> read_file(const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream) throw std::runtime_error("No such file '" + file + "'");
  return {std::istreambuf_iterator<char>(stream), {}};
}

std::shared_ptr<xclbin_impl> read_xclbin(const std::string& file) {
  const std::vector<char> content = read_file(file);
  std::uint64_t bytes = 0;
  constexpr std::size_t kHead = sizeof(kMagic) + sizeof(bytes);
  if (content.size() < kHead || std::memcmp(content.data(), kMagic, sizeof(kMagic)) != 0) {
    throw std::system_error(EINVAL, std::generic_category(), "Invalid xclbin");
  }
  std::memcpy(&bytes, content.data() + sizeof(kMagic), sizeof(bytes));
  if (bytes != content.size() - kHead || bytes % sizeof(std::int64_t) != 0) {
    throw std::system_error(EINVAL, std::generic_category(), "Invalid xclbin: it is cut off");
  }
  auto xclbin = std::make_shared<xclbin_impl>();
  xclbin->words.resize(bytes / sizeof(std::int64_t));
  std::memcpy(xclbin->words.data(), content.data() + kHead, bytes);
  static std::atomic<unsigned char> number{0};
  xuid_t id = {0x46, 0x4e, ++number};
  xclbin->id = uuid(id);
  return xclbin;
}

std::shared_ptr<hw_context_impl> open_context(const device& device, const uuid& id) {
  device_double::throw_if_struck("context", "DRM_IOCTL_AMDXDNA_CREATE_HWCTX IOCTL failed");
  auto context = std::make_shared<hw_context_impl>();
  context->device = device.get_handle();
  const std::lock_guard lock(context->device->mutex);
  const auto found = context->device->xclbins.find(id.to_string());
  if (found == context->device->xclbins.end()) {
    throw std::system_error(EINVAL, std::generic_category(), "No such xclbin was registered");
  }
  context->xclbin = found->second;
  context->emulator = device_double::make_emulator(context->xclbin->words);
  return context;
}

}  // namespace

namespace version {
unsigned int code() { return static_cast<unsigned int>(device_double::setting("version", kVersion)); }
}  // namespace version

namespace system {
unsigned int enumerate_devices() {
  return static_cast<unsigned int>(device_double::setting("devices", 1));
}
}  // namespace system

device::device(unsigned int index) {
  if (index >= system::enumerate_devices()) {
    throw std::runtime_error("No such device with index '" + std::to_string(index) + "'");
  }
  device_double::throw_if_struck("open", "Failed to open KMQ device");
  handle = std::make_shared<xrt_core::device>();
}

device::~device() = default;

uuid device::register_xclbin(const xclbin& xclbin) {
  const std::lock_guard lock(handle->mutex);
  handle->xclbins[xclbin.get_handle()->id.to_string()] = xclbin.get_handle();
  return xclbin.get_handle()->id;
}

std::any device::get_info_std(info::device parameter, const detail::abi& /*abi*/) const {
  if (parameter != info::device::name) throw std::runtime_error("the double knows its name only");
  return std::string("NPU double");
}

xclbin::xclbin(const std::string& file) : detail::pimpl<xclbin_impl>(read_xclbin(file)) {}

std::vector<xclbin::kernel> xclbin::get_kernels() const {
  return {kernel(std::make_shared<kernel_impl>(kernel_impl{"MLIR_AIE"}))};
}

std::string xclbin::kernel::get_name() const { return handle->name; }

hw_context::hw_context(const device& device, const uuid& id, access_mode /*mode*/)
    : detail::pimpl<hw_context_impl>(open_context(device, id)) {}

hw_context::~hw_context() = default;

kernel::kernel(const hw_context& context, const std::string& name) {
  if (name != "MLIR_AIE") throw std::runtime_error("No such kernel '" + name + "'");
  handle = std::make_shared<kernel_impl>();
  handle->context = context;
}

kernel::~kernel() = default;

int kernel::group_id(int argument) const { return static_cast<int>(group_of(argument)); }

}  // namespace xrt
