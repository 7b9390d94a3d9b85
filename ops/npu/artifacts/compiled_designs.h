// SPDX-License-Identifier: Apache-2.0
// CompiledDesigns: a folder of artifacts, its runtime and the loaded arrays, which the sessions of
// a process share. PreparedCall: a call of the folder that is ready for submission at any position.
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

// Environment variable: seconds within which a dispatch has to end.
inline constexpr const char* kTimeVariable = "FLOWNPU_NPU_TIMEOUT";

class CompiledDesigns {
 public:
  // The designs in a folder. A session that has them open shares them; otherwise they are opened
  // now. `emulated`: on the emulator, else on the NPU. Throws DeviceError.
  static std::shared_ptr<CompiledDesigns> open(const std::string& folder, bool emulated);

  CompiledDesigns(const std::string& folder, bool emulated);

  const Artifacts& artifacts() const { return artifacts_; }
  Runtime& runtime() { return *runtime_; }
  // The array of a call, which is loaded once. Throws DeviceError.
  Array& array(const CallRecord& call);
  // The family of a call, which all programs with that call share. Throws DeviceError.
  std::shared_ptr<const CallFamily> family(const CallRecord& call);

  // To be called when a run of a session begins. If a dispatch of any session has failed, the
  // arrays are in an unknown state: throws DeviceFailed, with the first failure's message.
  void begin_run();
  // Runs calls over the array of this number in one dispatch, and returns when they have ended. The
  // run's observer (ops/dispatch_observer.h) hears of it. Throws DeviceFailed.
  void dispatch(std::size_t array, std::span<const Call> calls);
  // Runs the host's work between dispatches, and reports it to the observer as a dispatch of an
  // array "host". `name`, `position`: as in Call.
  void compute(const std::string& name, std::int64_t position, const std::function<void()>& work);

 private:
  bool failed();
  // Reports to the observer, with the bytes that were moved since the last report.
  void tell(Dispatch dispatch);

  Artifacts artifacts_;
  std::chrono::milliseconds time_limit_;
  std::unique_ptr<Runtime> runtime_;
  std::mutex mutex_;  // guards what follows
  std::map<std::size_t, std::shared_ptr<Array>> arrays_;
  std::map<const CallRecord*, std::weak_ptr<const CallFamily>> families_;
  std::string failure_;
  Counts told_;  // the time of the last report to the observer
};

class PreparedCall {
 public:
  // `call`: one of the designs', which must outlive this. Throws DeviceError.
  PreparedCall(CompiledDesigns& designs, const CallRecord& call);

  // The number of its array.
  std::size_t array() const { return call_->array; }
  const std::string& file() const { return call_->file; }
  // How many choices its words follow.
  std::size_t choices() const { return family_->choices(); }

  // The call's words for a position and choices (CallFamily). They are valid until at() is called
  // for others with the same slot; a dispatch needs a slot for each of its positions. Throws Error
  // if there are no words for the position, or the call has another number of choices.
  Sequence* at(std::int64_t position, std::size_t slot = 0,
               std::span<const std::int64_t> choices = {});

 private:
  struct Words {
    std::unique_ptr<Sequence> sequence;
    std::int64_t position = -1;  // for which the words are
  };

  const CallRecord* call_;
  Array* array_;
  std::shared_ptr<const CallFamily> family_;
  // By class of positions and slot; made when first needed.
  std::map<std::pair<std::size_t, std::size_t>, Words> words_;
};

}  // namespace flownpu::npu
