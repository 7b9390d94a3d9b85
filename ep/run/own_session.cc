// SPDX-License-Identifier: Apache-2.0
#include "ep/run/own_session.h"

#include <memory>

namespace flownpu {
OwnSession::OwnSession(const Api& api, const std::string& model, int threads,
                       ort::OrtLoggingLevel severity)
    : api_(api) {
  // The process already has an ORT environment: this adds a reference to it.
  OrtEnv* environment = nullptr;
  api_.call(ort::CreateEnv, ort::ORT_LOGGING_LEVEL_WARNING, "FlowNPU", &environment);
  environment_ = {environment, [api](OrtEnv* owned) { api.call(ort::ReleaseEnv, owned); }};
  OrtSessionOptions* made = nullptr;
  api_.call(ort::CreateSessionOptions, &made);
  const auto release = [this](OrtSessionOptions* options) {
    api_.call(ort::ReleaseSessionOptions, options);
  };
  const std::unique_ptr<OrtSessionOptions, decltype(release)> options(made, release);
  api_.call(ort::SetIntraOpNumThreads, made, threads);
  api_.call(ort::SetSessionLogSeverityLevel, made, static_cast<int>(severity));
  OrtSession* session = nullptr;
  api_.call(ort::CreateSessionFromArray, environment, model.data(), model.size(), made, &session);
  session_ = {session, [api](OrtSession* owned) { api.call(ort::ReleaseSession, owned); }};
}

std::vector<OrtValue*> OwnSession::run(const OrtRunOptions* options,
                                       const std::vector<std::string>& names,
                                       const std::vector<const OrtValue*>& inputs,
                                       const std::vector<std::string>& outputs) const {
  std::vector<OrtValue*> results(outputs.size());
  const std::vector<const char*> input_names = c_strings(names);
  const std::vector<const char*> output_names = c_strings(outputs);
  api_.call(ort::Run, session_.get(), options, input_names.data(), inputs.data(), inputs.size(),
            output_names.data(), output_names.size(), results.data());
  return results;
}

}  // namespace flownpu
