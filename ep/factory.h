// SPDX-License-Identifier: Apache-2.0
// Factory: represents one registration of the library with one copy of ONNX Runtime, and makes that
// copy's providers.
#pragma once

#include <atomic>
#include <cstddef>
#include <span>
#include <string_view>

#include "ep/api.h"
#include "ep/ep.h"

namespace flownpu {

// If a library is unregistered while a session is alive, ORT calls the factory's ReleaseEp after it
// has released the factory. The factory therefore lives until it and all its providers are
// released.
class Factory final : public ort::OrtEpFactory {
 public:
  // A registration whose name ends in ".virtual" (ORT's convention) only offers the emulated NPU.
  Factory(const Api& api, std::string_view registration);
  ~Factory();
  Factory(const Factory&) = delete;
  Factory& operator=(const Factory&) = delete;

  // ORT's ReleaseEpFactory.
  void release() noexcept;

 private:
  std::size_t offer(std::span<const OrtHardwareDevice* const> devices,
                    std::span<OrtEpDevice*> offered);
  OrtEpDevice* offer_emulated();
  // Whether the provider can use the device: any CPU, and an AMD NPU if this build drives NPUs.
  bool drives(const OrtHardwareDevice* device) const;
  bool has_npu(std::span<const OrtHardwareDevice* const> devices) const;
  // Whether a session with default options runs a model that was compiled for `compatibility`.
  bool runs(std::span<const OrtHardwareDevice* const> devices,
            std::string_view compatibility) const;
  ort::OrtEp* create_ep(std::span<const OrtHardwareDevice* const> devices,
                        const OrtSessionOptions* options, const OrtLogger* logger);

  Api api_;
  bool virtual_;
  OrtHardwareDevice* emulated_ = nullptr;  // owned while ORT may use it
  std::atomic<int> references_ = 1;
};

}  // namespace flownpu
