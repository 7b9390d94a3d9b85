// SPDX-License-Identifier: Apache-2.0
#include "ep/api.h"

#include <algorithm>
#include <charconv>
#include <new>

#include "ops/formats/utf8.h"

namespace flownpu {
namespace {

// ORT numbers its API by its minor version: 1.31.1 has API 31. Asking GetApi() for a version that
// the runtime does not have would print to stderr.
std::uint32_t api_version_of(std::string_view runtime_version) {
  std::uint32_t minor = 0;
  const std::size_t dot = runtime_version.find('.');
  if (dot != std::string_view::npos) {
    const std::string_view rest = runtime_version.substr(dot + 1);
    std::from_chars(rest.data(), rest.data() + rest.size(), minor);
  }
  return minor;
}

}  // namespace

Api::Api(const ort::OrtApiBase& base) noexcept : runtime_version_(base.GetVersionString()) {
  const std::uint32_t available = api_version_of(runtime_version_);
  version_ = std::min(available, ort::kHighestVersion);
  api_ = base.GetApi(std::max(version_, 1U));
  if (version_ >= ort::kLowestVersion) {
    ep_api_ = call(ort::GetEpApi);
    model_editor_api_ = call(ort::GetModelEditorApi);
  }
}

OrtStatus* Api::status(ort::OrtErrorCode code, const char* message) const noexcept {
  try {
    return resolve(ort::CreateStatus)(code, as_utf8(message).c_str());
  } catch (const std::bad_alloc&) {
    return resolve(ort::CreateStatus)(code, "[FlowNPU] out of memory");
  }
}

void Api::log(const OrtLogger* logger, ort::OrtLoggingLevel level,
              const std::string& message) const noexcept {
  try {
    call(ort::Logger_LogMessage, logger, level, as_utf8(message).c_str(), __FILE__, __LINE__,
         "FlowNPU");
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): see the header.
  }
}

void Api::check(OrtStatus* status) const {
  if (status == nullptr) return;
  const std::string message = call(ort::GetErrorMessage, status);
  call(ort::ReleaseStatus, status);
  throw Error(message);
}

std::vector<const char*> c_strings(const std::vector<std::string>& texts) {
  std::vector<const char*> pointers;
  pointers.reserve(texts.size());
  for (const std::string& text : texts) pointers.push_back(text.c_str());
  return pointers;
}

}  // namespace flownpu
