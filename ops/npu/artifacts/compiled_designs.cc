// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/artifacts/compiled_designs.h"

#include <utility>

#include "ops/dispatch_observer.h"
#include "ops/error.h"
#include "ops/npu/driver/runtimes.h"
#include "ops/system/variables.h"

namespace flownpu::npu {
namespace {

// Programs have no dispatch that is predicted to take more than half a second
// (aie/programs/dispatches.py); the limit is ten times that.
constexpr std::chrono::seconds kTimeLimit{5};

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Dispatch describe(std::span<const Call> calls, const std::string& array, std::int64_t begin_ns) {
  Dispatch dispatch{.array = array, .begin_ns = begin_ns, .end_ns = now_ns()};
  for (const Call& call : calls) {
    const std::string_view separator = dispatch.calls.empty() ? "" : "; ";
    dispatch.calls.append(separator).append(call.name);
    dispatch.files.append(separator).append(call.family);
    dispatch.positions.append(separator).append(std::to_string(call.position));
  }
  return dispatch;
}

std::unique_ptr<Runtime> open_runtime(const Artifacts& artifacts) {
  return artifacts.emulated() ? open_emulated_runtime(artifacts.target()) : open_xrt_runtime();
}

}  // namespace

// The table has weak references only: sessions own the designs.
std::shared_ptr<CompiledDesigns> CompiledDesigns::open(const std::string& folder, bool emulated) {
  static std::mutex mutex;
  static std::map<std::pair<std::string, bool>, std::weak_ptr<CompiledDesigns>> opened;
  const std::lock_guard lock(mutex);
  std::weak_ptr<CompiledDesigns>& known = opened[{folder, emulated}];
  std::shared_ptr<CompiledDesigns> designs = known.lock();
  if (designs != nullptr && !designs->failed()) {
    // The folder may have been built again since.
    if (Artifacts(folder, emulated).identity() == designs->artifacts().identity()) return designs;
  }
  designs = std::make_shared<CompiledDesigns>(folder, emulated);
  known = designs;
  return designs;
}

CompiledDesigns::CompiledDesigns(const std::string& folder, bool emulated)
    : artifacts_(folder, emulated),
      time_limit_(seconds_of(kTimeVariable, kTimeLimit)),
      runtime_(open_runtime(artifacts_)) {}

Array& CompiledDesigns::array(const CallRecord& call) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Array>& array = arrays_[call.array];
  if (array == nullptr) array = runtime_->load(artifacts_.array_file(call));
  // XRT would look up a missing argument without a check, and crash.
  if (call.buffers.size() > array->most_buffers()) {
    artifacts_.refuse("the array " + artifacts_.array(call.array).name + " takes " +
                          std::to_string(array->most_buffers()) + " buffers, and its call " +
                          call.name + " has " + std::to_string(call.buffers.size()),
                      "compile it of its call with the most buffers");
  }
  return *array;
}

std::shared_ptr<const CallFamily> CompiledDesigns::family(const CallRecord& call) {
  const std::lock_guard lock(mutex_);
  std::weak_ptr<const CallFamily>& known = families_[&call];
  std::shared_ptr<const CallFamily> family = known.lock();
  if (family == nullptr) {
    family = std::make_shared<const CallFamily>(artifacts_.family(call));
    known = family;
  }
  return family;
}

bool CompiledDesigns::failed() {
  const std::lock_guard lock(mutex_);
  return !failure_.empty();
}

void CompiledDesigns::begin_run() {
  const std::lock_guard lock(mutex_);
  if (!failure_.empty()) throw DeviceFailed(failure_);
  // Counting begins with the first observed run; the transfers that load the model belong to no
  // run.
  if (current_dispatch_observer() != nullptr && told_.dispatches == 0) told_ = runtime_->counts();
}

void CompiledDesigns::dispatch(std::size_t array, std::span<const Call> calls) {
  const std::int64_t begin_ns = now_ns();
  Array* loaded = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) throw DeviceFailed(failure_);
    loaded = arrays_.at(array).get();
  }
  try {
    runtime_->run(*loaded, calls, time_limit_);
  } catch (const DeviceError& error) {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = error.what();
    throw DeviceFailed(error.what());
  }
  if (current_dispatch_observer() != nullptr)
    tell(describe(calls, artifacts_.array(array).name, begin_ns));
}

void CompiledDesigns::compute(const std::string& name, std::int64_t position,
                              const std::function<void()>& work) {
  const std::int64_t begin_ns = now_ns();
  work();
  if (current_dispatch_observer() == nullptr) return;
  tell({.array = std::string(kHost),
        .calls = name,
        .positions = std::to_string(position),
        .begin_ns = begin_ns,
        .end_ns = now_ns()});
}

void CompiledDesigns::tell(Dispatch dispatch) {
  {
    const std::lock_guard lock(mutex_);
    const Counts counts = runtime_->counts();
    dispatch.bytes_to_device = counts.bytes_to_device - told_.bytes_to_device;
    dispatch.bytes_to_host = counts.bytes_to_host - told_.bytes_to_host;
    dispatch.word_bytes = counts.word_bytes - told_.word_bytes;
    told_ = counts;
  }
  current_dispatch_observer()->dispatched(std::move(dispatch));
}

PreparedCall::PreparedCall(CompiledDesigns& designs, const CallRecord& call)
    : call_(&call), array_(&designs.array(call)), family_(designs.family(call)) {}

Sequence* PreparedCall::at(std::int64_t position, std::size_t slot,
                           std::span<const std::int64_t> choices) {
  if (choices.size() != family_->choices())
    fail("[FlowNPU] call ", call_->name, ": expected ", family_->choices(), " choices, got ",
         choices.size());
  const std::size_t number = family_->class_of(position);
  Words& words = words_[{number, slot}];
  if (words.sequence == nullptr) {
    // Before they are patched for a position, the words may not be a valid sequence.
    std::vector<std::int64_t> first = family_->at(number).words;
    family_->patch(
        position, [&](std::size_t word, std::int64_t value) { first[word] = value; }, choices);
    words.sequence = array_->sequence(first);
  } else if (words.position != position || !choices.empty()) {
    family_->patch(
        position, [&](std::size_t word, std::int64_t value) { words.sequence->write(word, value); },
        choices);
  }
  words.position = position;
  return words.sequence.get();
}

}  // namespace flownpu::npu
