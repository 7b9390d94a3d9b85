// SPDX-License-Identifier: Apache-2.0
// Api: typed access to ONNX Runtime's function tables, and the conversion of errors: an OrtStatus
// from ORT becomes an Error inside of the provider, and an exception that would leave the provider
// becomes an OrtStatus (guard).
#pragma once

#include <cstdint>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "ep/abi.h"
#include "ops/error.h"

namespace flownpu {

inline constexpr const char* kEpName = "FlowNPUExecutionProvider";

// Each factory, provider and compiled node has a copy of its own. There is no global one, because
// one process may hold two copies of ONNX Runtime (the packages `onnxruntime` and
// `onnxruntime_genai` have one each), whose tables differ.
class Api {
 public:
  // Never throws, so that an ORT that is too old can still get an error. Check version() before
  // calling anything else.
  explicit Api(const ort::OrtApiBase& base) noexcept;

  // The API version to announce: the runtime's, but at most kHighestVersion. If it is below
  // kLowestVersion, only status() may be used.
  std::uint32_t version() const { return version_; }
  std::string_view runtime_version() const { return runtime_version_; }

  // Calls a function of OrtApi, OrtEpApi or OrtModelEditorApi. If the function returns an
  // OrtStatus, a failure is thrown as an Error with ORT's message.
  template <typename Table, typename Result, typename... Parameters>
  auto call(const ort::Function<Table, Result(Parameters...)>& function,
            std::type_identity_t<Parameters>... arguments) const {
    if constexpr (std::is_same_v<Result, OrtStatus*>) {
      check(resolve(function)(arguments...));
    } else {
      return resolve(function)(arguments...);
    }
  }

  // A new OrtStatus, which ORT owns once it is returned to it. The message is converted to UTF-8
  // (as_utf8). A model's names in it may have another encoding, and Python could then not raise the
  // error.
  OrtStatus* status(ort::OrtErrorCode code, const char* message) const noexcept;

  // Writes to ORT's log, in UTF-8. Failures are ignored.
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

// The texts as ORT's functions take lists of names; valid as long as `texts`.
std::vector<const char*> c_strings(const std::vector<std::string>& texts);

// Runs the `body` of a function that ORT calls. Returns null for success, else a status with the
// exception's text.
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
