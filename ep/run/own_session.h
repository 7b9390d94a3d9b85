// SPDX-License-Identifier: Apache-2.0
// A session of this provider's own, on ONNX Runtime's CPU provider.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ep/api.h"

namespace flownpu {

class OwnSession {
 public:
  // `model`: the bytes of a ModelProto. `threads`: as in SetIntraOpNumThreads. The session logs
  // what is at least this severe. Throws Error with ONNX Runtime's message.
  OwnSession(const Api& api, const std::string& model, int threads, ort::OrtLoggingLevel severity);

  // `options` may be null. The caller releases the returned values. Throws Error with ONNX
  // Runtime's message.
  std::vector<OrtValue*> run(const OrtRunOptions* options, const std::vector<std::string>& names,
                             const std::vector<const OrtValue*>& inputs,
                             const std::vector<std::string>& outputs) const;

 private:
  Api api_;
  std::shared_ptr<OrtEnv> environment_;
  std::shared_ptr<OrtSession> session_;
};

}  // namespace flownpu
