// SPDX-License-Identifier: Apache-2.0
// A session on ONNX Runtime's CPU provider that this provider makes for itself.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "ep/api.h"

namespace flownpu {

class OwnSession {
 public:
  // `model`: the bytes of a ModelProto. `threads`: as in SetIntraOpNumThreads. The session logs
  // what is at least this severe. Throws Error with ONNX Runtime's message.
  OwnSession(const Api& api, const std::string& model, int threads, ort::OrtLoggingLevel severity);

  // Writes the outputs to `results`, which the caller releases; it allocates nothing of ours.
  // `options` may be null. Throws Error with ONNX Runtime's message.
  void run(const OrtRunOptions* options, std::span<const char* const> input_names,
           std::span<const OrtValue* const> inputs, std::span<const char* const> output_names,
           std::span<OrtValue*> results) const;

 private:
  Api api_;
  std::shared_ptr<OrtEnv> environment_;
  std::shared_ptr<OrtSession> session_;
};

}  // namespace flownpu
