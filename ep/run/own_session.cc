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

void OwnSession::run(const OrtRunOptions* options, std::span<const char* const> input_names,
                     std::span<const OrtValue* const> inputs,
                     std::span<const char* const> output_names,
                     std::span<OrtValue*> results) const {
  api_.call(ort::Run, session_.get(), options, input_names.data(), inputs.data(), inputs.size(),
            output_names.data(), output_names.size(), results.data());
}

}  // namespace flownpu
