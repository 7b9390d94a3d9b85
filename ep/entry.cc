// SPDX-License-Identifier: Apache-2.0
// The two functions that ONNX Runtime looks up in the library.
#include <memory>

#include "ep/factory.h"
#include "ops/system/library.h"

#define FLOWNPU_EXPORT __attribute__((visibility("default")))

using flownpu::Api;
using flownpu::Factory;
namespace ort = flownpu::ort;

extern "C" {

FLOWNPU_EXPORT OrtStatus* CreateEpFactories(const char* registration_name,
                                            const ort::OrtApiBase* api_base,
                                            const OrtLogger* /*default_logger*/,
                                            ort::OrtEpFactory** factories,
                                            std::size_t max_factories,
                                            std::size_t* num_factories) noexcept {
  const Api api(*api_base);
  return flownpu::guard(api, ort::ORT_FAIL, [&] {
    if (api.version() < ort::kLowestVersion) {
      flownpu::fail("[FlowNPU] expected ONNX Runtime 1.", ort::kLowestVersion, " or later, got ",
                    api.runtime_version(),
                    ": install a newer one (pip install --upgrade onnxruntime)");
    }
    if (max_factories < 1) flownpu::fail("[FlowNPU] expected room for 1 factory, got 0");
    flownpu::stay_loaded();
    factories[0] = std::make_unique<Factory>(api, registration_name).release();
    *num_factories = 1;
  });
}

FLOWNPU_EXPORT OrtStatus* ReleaseEpFactory(ort::OrtEpFactory* factory) noexcept {
  if (factory != nullptr) static_cast<Factory*>(factory)->release();
  return nullptr;
}

}  // extern "C"
