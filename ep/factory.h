// SPDX-License-Identifier: Apache-2.0
// Factory: what one registration of the library with one copy of ONNX Runtime gets.
#pragma once

#include <atomic>
#include <cstddef>
#include <span>
#include <string_view>

#include "ep/api.h"
#include "ep/ep.h"

namespace flownpu {

// ORT calls ReleaseEp through the factory even after it has released the factory, when a library is
// unregistered while a session lives. So the factory lives until it and all its providers are
// released.
class Factory final : public ort::OrtEpFactory {
 public:
  // A registration whose name ends in ".virtual" (ORT's convention) is offered the emulated NPU,
  // and nothing else.
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
  // The CPU always; an AMD NPU that this build drives.
  bool drives(const OrtHardwareDevice* device) const;
  ort::OrtEp* create_ep(std::span<const OrtHardwareDevice* const> devices,
                        const OrtSessionOptions* options, const OrtLogger* logger);

  Api api_;
  bool virtual_;
  OrtHardwareDevice* emulated_ = nullptr;  // ours, for as long as ORT may ask for it
  std::atomic<int> references_ = 1;
};

}  // namespace flownpu
