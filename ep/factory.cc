// SPDX-License-Identifier: Apache-2.0
#include "ep/factory.h"

#include <algorithm>
#include <memory>

#include "ep/context/compiled_model.h"
#include "ep/options.h"
#include "ops/npu/device.h"

namespace flownpu {
namespace {

// The PCI vendor id of the supported NPUs: AMD.
constexpr std::uint32_t kNpuVendor = 0x1022;

}  // namespace

Factory::Factory(const Api& api, std::string_view registration)
    : api_(api), virtual_(registration.ends_with(".virtual")) {
  ort_version_supported = api.version();
  GetName = [](const OrtEpFactory* /*self*/) noexcept { return kEpName; };
  GetVendor = [](const OrtEpFactory* /*self*/) noexcept { return "FlowNPU"; };
  // ORT prefers a provider whose vendor made the hardware; 0 is no hardware vendor.
  GetVendorId = [](const OrtEpFactory* /*self*/) noexcept -> std::uint32_t { return 0; };
  GetVersion = [](const OrtEpFactory* /*self*/) noexcept { return FLOWNPU_VERSION; };
  GetSupportedDevices = [](OrtEpFactory* self, const OrtHardwareDevice* const* devices,
                           std::size_t num_devices, OrtEpDevice** ep_devices,
                           std::size_t max_ep_devices, std::size_t* num_ep_devices) noexcept {
    auto& factory = *static_cast<Factory*>(self);
    return guard(factory.api_, ort::ORT_FAIL, [&] {
      *num_ep_devices = factory.offer({devices, num_devices}, {ep_devices, max_ep_devices});
    });
  };
  CreateEp = [](OrtEpFactory* self, const OrtHardwareDevice* const* devices,
                const OrtKeyValuePairs* const* /*metadata*/, std::size_t num_devices,
                const OrtSessionOptions* session_options, const OrtLogger* logger,
                ort::OrtEp** ep) noexcept {
    auto& factory = *static_cast<Factory*>(self);
    return guard(factory.api_, ort::ORT_FAIL,
                 [&] { *ep = factory.create_ep({devices, num_devices}, session_options, logger); });
  };
  ReleaseEp = [](OrtEpFactory* self, ort::OrtEp* ep) noexcept {
    if (ep == nullptr) return;
    delete static_cast<Ep*>(ep);
    static_cast<Factory*>(self)->release();
  };
  ValidateCompiledModelCompatibilityInfo =
      [](OrtEpFactory* self, const OrtHardwareDevice* const* devices, std::size_t num_devices,
         const char* compatibility, ort::OrtCompiledModelCompatibility* result) noexcept {
        const auto& factory = *static_cast<const Factory*>(self);
        return guard(factory.api_, ort::ORT_FAIL, [&] {
          *result = factory.runs({devices, num_devices}, compatibility)
                        ? ort::OrtCompiledModelCompatibility_EP_SUPPORTED_OPTIMAL
                        : ort::OrtCompiledModelCompatibility_EP_UNSUPPORTED;
        });
      };
  CreateDataTransfer = [](OrtEpFactory* /*self*/,
                          OrtDataTransferImpl** transfer) noexcept -> OrtStatus* {
    *transfer = nullptr;  // all memory is host memory
    return nullptr;
  };
}

Factory::~Factory() {
  if (emulated_ != nullptr) api_.call(ort::ReleaseHardwareDevice, emulated_);
}

void Factory::release() noexcept {
  if (references_.fetch_sub(1) == 1) delete this;
}

bool Factory::drives(const OrtHardwareDevice* device) const {
  switch (api_.call(ort::HardwareDevice_Type, device)) {
    case ort::OrtHardwareDeviceType_CPU:
      return true;
    case ort::OrtHardwareDeviceType_NPU:
      return npu_built_in() && api_.call(ort::HardwareDevice_VendorId, device) == kNpuVendor;
    default:
      return false;
  }
}

std::size_t Factory::offer(std::span<const OrtHardwareDevice* const> devices,
                           std::span<OrtEpDevice*> offered) {
  if (virtual_) {
    if (offered.empty()) return 0;
    offered[0] = offer_emulated();
    return 1;
  }
  std::size_t count = 0;
  for (const OrtHardwareDevice* device : devices) {
    if (count == offered.size() || !drives(device)) continue;
    api_.call(ort::CreateEpDevice, this, device, nullptr, nullptr, &offered[count]);
    ++count;
  }
  return count;
}

// A virtual NPU, with the option that makes its sessions use the emulator.
OrtEpDevice* Factory::offer_emulated() {
  const auto release = [this](OrtKeyValuePairs* owned) {
    api_.call(ort::ReleaseKeyValuePairs, owned);
  };
  const auto pairs = [&](const char* key, const char* value) {
    OrtKeyValuePairs* made = nullptr;
    api_.call(ort::CreateKeyValuePairs, &made);
    std::unique_ptr<OrtKeyValuePairs, decltype(release)> owner(made, release);
    api_.call(ort::AddKeyValuePair, made, key, value);
    return owner;
  };
  const auto metadata = pairs("is_virtual", "1");
  if (emulated_ == nullptr) {
    constexpr std::uint32_t kNoDevice = 0;
    api_.call(ort::CreateHardwareDevice, ort::OrtHardwareDeviceType_NPU, kNpuVendor, kNoDevice,
              "AMD", metadata.get(), &emulated_);
  }
  const auto options = pairs("device", "emulate");
  OrtEpDevice* device = nullptr;
  api_.call(ort::CreateEpDevice, this, emulated_, metadata.get(), options.get(), &device);
  return device;
}

bool Factory::has_npu(std::span<const OrtHardwareDevice* const> devices) const {
  return std::ranges::any_of(devices, [this](const OrtHardwareDevice* device) {
    return api_.call(ort::HardwareDevice_Type, device) == ort::OrtHardwareDeviceType_NPU;
  });
}

// The question comes without options, which could choose another device; and whether the artifacts
// of an NPU's model are there, only a session finds out.
bool Factory::runs(std::span<const OrtHardwareDevice* const> devices,
                   std::string_view compatibility) const {
  const std::string_view made_for = device_of_context(compatibility);
  if (!has_npu(devices)) return made_for == "cpu";
  return made_for.starts_with(npu::compatible_layout(virtual_ ? "emulate" : "npu") + ", ");
}

ort::OrtEp* Factory::create_ep(std::span<const OrtHardwareDevice* const> devices,
                               const OrtSessionOptions* options, const OrtLogger* logger) {
  auto ep = std::make_unique<Ep>(api_, options, has_npu(devices), logger);
  references_.fetch_add(1);
  return ep.release();
}

}  // namespace flownpu
