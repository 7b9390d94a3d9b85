// SPDX-License-Identifier: Apache-2.0
// Factory: what one registration of the library with one copy of ONNX Runtime gets.
#pragma once

#include <atomic>
#include <cstddef>
#include <span>

#include "ep/api.h"
#include "ep/ep.h"

namespace flownpu {

// ORT calls ReleaseEp through the factory even after it has released the factory, when a library is
// unregistered while a session lives. So the factory lives until it and all its providers are
// released.
class Factory final : public ort::OrtEpFactory {
 public:
  explicit Factory(const Api& api);

  // ORT's ReleaseEpFactory.
  void release() noexcept;

 private:
  std::size_t offer(std::span<const OrtHardwareDevice* const> devices,
                    std::span<OrtEpDevice*> offered);
  // The CPU always; an AMD NPU that this build drives.
  bool drives(const OrtHardwareDevice* device) const;
  ort::OrtEp* create_ep(std::span<const OrtHardwareDevice* const> devices,
                        const OrtSessionOptions* options, const OrtLogger* logger);

  Api api_;
  std::atomic<int> references_ = 1;
};

}  // namespace flownpu
