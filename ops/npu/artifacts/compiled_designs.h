// SPDX-License-Identifier: Apache-2.0
// CompiledDesigns: a folder of artifacts together with the runtime that runs them and the arrays
// that are loaded, which the sessions of a process share. PreparedCall: a call of the folder, ready
// to be submitted at any position.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ops/dispatch_observer.h"
#include "ops/npu/artifacts/index.h"
#include "ops/npu/driver/runtime.h"

namespace flownpu::npu {

// Seconds within which a dispatch has to end, in the environment.
inline constexpr const char* kTimeVariable = "FLOWNPU_NPU_TIMEOUT";

class CompiledDesigns {
 public:
  // The folder's, opened now or by another session that still lives; `emulated`: on the emulator,
  // else on the NPU. Throws DeviceError.
  static std::shared_ptr<CompiledDesigns> open(const std::string& folder, bool emulated);

  CompiledDesigns(const std::string& folder, bool emulated);

  const Artifacts& artifacts() const { return artifacts_; }
  Runtime& runtime() { return *runtime_; }
  // The array of a call, loaded once. Throws DeviceError.
  Array& array(const CallRecord& call);
  // Its family, which programs that make the call share. Throws DeviceError.
  std::shared_ptr<const CallFamily> family(const CallRecord& call);

  // A run of a session begins. Throws DeviceFailed with what was said first, if a dispatch has
  // failed, of whichever session: the arrays are in an unknown state then.
  void begin_run();
  // Calls over the array of this number in one dispatch, of which ops/dispatch_observer.h hears;
  // returns when they have ended. Throws DeviceFailed.
  void dispatch(std::size_t array, std::span<const Call> calls);
  // What the host computes between dispatches, of which the observer hears as well, as of the array
  // "host"; `name`, `position`: as of a Call.
  void compute(const std::string& name, std::int64_t position, const std::function<void()>& work);

 private:
  bool failed();
  // With the bytes that were moved since the last that was told of.
  void tell(Dispatch dispatch);

  Artifacts artifacts_;
  std::chrono::milliseconds time_limit_;
  std::unique_ptr<Runtime> runtime_;
  std::mutex mutex_;  // for what follows
  std::map<std::size_t, std::shared_ptr<Array>> arrays_;
  std::map<const CallRecord*, std::weak_ptr<const CallFamily>> families_;
  std::string failure_;
  Counts told_;  // as of the last that was told of
};

class PreparedCall {
 public:
  // `call`: of the designs, which must outlive this. Throws DeviceError.
  PreparedCall(CompiledDesigns& designs, const CallRecord& call);

  // The number of its array.
  std::size_t array() const { return call_->array; }
  const std::string& file() const { return call_->file; }

  // Its words for a position, until they are asked for at another in this slot, of which a dispatch
  // needs one for each position. Throws Error if there are none.
  Sequence* at(std::int64_t position, std::size_t slot = 0);

 private:
  struct Words {
    std::unique_ptr<Sequence> sequence;
    std::int64_t position = -1;  // that they are for
  };

  const CallRecord* call_;
  Array* array_;
  std::shared_ptr<const CallFamily> family_;
  // By class of positions and slot, made when they are needed first.
  std::map<std::pair<std::size_t, std::size_t>, Words> words_;
};

}  // namespace flownpu::npu
