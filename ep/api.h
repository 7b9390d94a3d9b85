// SPDX-License-Identifier: Apache-2.0
// Api: ONNX Runtime's function tables with types, and the two directions of errors. Inside the
// provider an OrtStatus becomes an Error; at the ABI's edge an exception becomes an OrtStatus
// (guard).
#pragma once

#include <cstdint>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>

#include "ep/abi.h"
#include "ops/error.h"

namespace flownpu {

inline constexpr const char* kEpName = "FlowNPUExecutionProvider";

// A copy belongs to each factory, provider and compiled node: one process may hold two copies of
// ONNX Runtime (the `onnxruntime` and `onnxruntime_genai` packages do), so that no global could say
// which tables are meant.
class Api {
 public:
  // Never throws, so that an ORT that is too old can be told so: look at version() first.
  explicit Api(const ort::OrtApiBase& base) noexcept;

  // The version to announce: the runtime's own, but at most kHighestVersion; below kLowestVersion
  // nothing but status() may be used.
  std::uint32_t version() const { return version_; }
  std::string_view runtime_version() const { return runtime_version_; }

  // Calls a function of OrtApi, OrtEpApi or OrtModelEditorApi. One that reports by OrtStatus throws
  // Error with ORT's message.
  template <typename Table, typename Result, typename... Parameters>
  auto call(const ort::Function<Table, Result(Parameters...)>& function,
            std::type_identity_t<Parameters>... arguments) const {
    if constexpr (std::is_same_v<Result, OrtStatus*>) {
      check(resolve(function)(arguments...));
    } else {
      return resolve(function)(arguments...);
    }
  }

  // A new OrtStatus, owned by ORT once it is returned to it. Names in a message are a model's,
  // which may be no UTF-8; messages are (as_utf8): Python cannot raise an error of others, and
  // takes its failing to for ours.
  OrtStatus* status(ort::OrtErrorCode code, const char* message) const noexcept;

  // Writes to ORT's log, in UTF-8; what goes wrong there is not worth failing for.
  void log(const OrtLogger* logger, ort::OrtLoggingLevel level,
           const std::string& message) const noexcept;

 private:
  template <typename Table>
  const void* table() const {
    if constexpr (std::is_same_v<Table, OrtApi>) {
      return api_;
    } else if constexpr (std::is_same_v<Table, OrtEpApi>) {
      return ep_api_;
    } else {
      return model_editor_api_;
    }
  }
  template <typename Table, typename Result, typename... Parameters>
  auto resolve(const ort::Function<Table, Result(Parameters...)>& function) const {
    using Pointer = Result (*)(Parameters...) noexcept;
    return reinterpret_cast<Pointer>(static_cast<void* const*>(table<Table>())[function.ordinal]);
  }
  void check(OrtStatus* status) const;

  const OrtApi* api_ = nullptr;
  const OrtEpApi* ep_api_ = nullptr;
  const OrtModelEditorApi* model_editor_api_ = nullptr;
  std::uint32_t version_ = 0;
  std::string_view runtime_version_;  // ORT's own static string.
};

// Runs `body` at the ABI's edge: null for success, else a status with the exception's text.
template <typename Body>
OrtStatus* guard(const Api& api, ort::OrtErrorCode code, const Body& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const std::bad_alloc&) {
    return api.status(code, "[FlowNPU] out of memory");
  } catch (const std::exception& error) {
    return api.status(code, error.what());
  } catch (...) {
    return api.status(code, "[FlowNPU] an exception of unknown type");
  }
}

}  // namespace flownpu
