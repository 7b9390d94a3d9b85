// SPDX-License-Identifier: Apache-2.0
#include "ep/run/profiling.h"

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ops/formats/utf8.h"
#include "ops/system/threads.h"

namespace flownpu {
namespace {

// ORT's own profiler also stops recording at this number of events (max_num_events).
constexpr std::size_t kMaxEvents = 1'000'000;

struct Event {
  std::string name;
  // ORT writes values that look like JSON without quotes into its profile.
  std::vector<std::pair<const char*, std::string>> arguments;
  std::int32_t thread = 0;
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
};

// The events of one profiler. They are shared, because threads may still hold them when ORT
// releases the profiler.
class Recording final : public StepObserver {
 public:
  void ran(const Node& node, std::span<const Tensor> outputs, std::size_t held,
           std::int64_t begin_ns, std::int64_t end_ns) override {
    std::string shapes;
    for (const Tensor& output : outputs) {
      if (output.data != nullptr)
        shapes.append(shapes.empty() ? "[" : ",").append(to_string(output.shape));
    }
    shapes += shapes.empty() ? "[]" : "]";
    add({.name = node.name,
         .arguments = {{"op_name", node.op_type},
                       {"output_shapes", shapes},
                       {"bytes_held", std::to_string(held)}},
         .thread = thread_number(),
         .begin_ns = begin_ns,
         .end_ns = end_ns});
  }

  void dispatched(Dispatch dispatch) override {
    const char* const kind = dispatch.array == kHost       ? "host step"
                             : dispatch.array == kHandOver ? "hand-over"
                                                           : "dispatch";
    add({.name = std::move(dispatch.calls),
         .arguments = {{"op_name", kind},
                       {"array", std::move(dispatch.array)},
                       {"files", std::move(dispatch.files)},
                       {"positions", std::move(dispatch.positions)},
                       {"bytes_to_device", std::to_string(dispatch.bytes_to_device)},
                       {"bytes_to_host", std::to_string(dispatch.bytes_to_host)},
                       {"word_bytes", std::to_string(dispatch.word_bytes)}},
         .thread = thread_number(),
         .begin_ns = dispatch.begin_ns,
         .end_ns = dispatch.end_ns});
  }

  std::vector<Event> take() {
    const std::scoped_lock lock(mutex_);
    return std::exchange(events_, {});
  }

 private:
  void add(Event event) {
    const std::scoped_lock lock(mutex_);
    if (events_.size() < kMaxEvents) events_.push_back(std::move(event));
  }

  std::mutex mutex_;
  std::vector<Event> events_;
};

// One entry for each ORT event that has started but not stopped on this thread, the innermost last.
thread_local std::vector<std::shared_ptr<Recording>> watching;

class Profiler final : public ort::OrtEpProfilerImpl {
 public:
  Profiler(const Api& api, std::string device) : api_(api), device_(std::move(device)) {
    ort_version_supported = api.version();
    Release = [](OrtEpProfilerImpl* self) noexcept { delete static_cast<Profiler*>(self); };
    StartProfiling = [](OrtEpProfilerImpl* self, std::int64_t offset_ns) noexcept -> OrtStatus* {
      auto& profiler = *static_cast<Profiler*>(self);
      const auto now = std::chrono::steady_clock::now().time_since_epoch();
      profiler.origin_ns_ =
          std::chrono::duration_cast<std::chrono::nanoseconds>(now).count() - offset_ns;
      return nullptr;
    };
    StartEvent = [](OrtEpProfilerImpl* self, std::uint64_t /*correlation_id*/) noexcept {
      auto& profiler = *static_cast<Profiler*>(self);
      return guard(profiler.api_, ort::ORT_FAIL, [&] { watching.push_back(profiler.recording_); });
    };
    StopEvent = [](OrtEpProfilerImpl* self, std::uint64_t /*correlation_id*/,
                   const OrtProfilingEvent* /*event*/) noexcept -> OrtStatus* {
      const auto& profiler = *static_cast<Profiler*>(self);
      if (!watching.empty() && watching.back() == profiler.recording_) watching.pop_back();
      return nullptr;
    };
    EndProfiling = [](OrtEpProfilerImpl* self, OrtProfilingEventsContainer* container) noexcept {
      auto& profiler = *static_cast<Profiler*>(self);
      return guard(profiler.api_, ort::ORT_FAIL, [&] { profiler.report(container); });
    };
  }

 private:
  void report(OrtProfilingEventsContainer* container) const {
    for (const Event& event : recording_->take()) {
      const std::string name = as_utf8(event.name);
      std::vector<const char*> keys{"provider", "device"};
      std::vector<const char*> values{kEpName, device_.c_str()};
      for (const auto& [key, value] : event.arguments) {
        keys.push_back(key);
        values.push_back(value.c_str());
      }
      OrtProfilingEvent* profiling_event = nullptr;
      api_.call(ort::CreateProfilingEvent, ort::OrtProfilingEventCategory_KERNEL, process_number(),
                event.thread, name.c_str(), (event.begin_ns - origin_ns_) / 1000,
                (event.end_ns - event.begin_ns) / 1000, keys.data(), values.data(), keys.size(),
                &profiling_event);
      const auto release = [this](OrtProfilingEvent* owned) {
        api_.call(ort::ReleaseProfilingEvent, owned);
      };
      const std::unique_ptr<OrtProfilingEvent, decltype(release)> owner(profiling_event, release);
      api_.call(ort::ProfilingEventsContainer_AddEvents, container, &profiling_event, 1);
    }
  }

  Api api_;
  std::string device_;
  // The steady clock's reading when ORT's profile began.
  std::int64_t origin_ns_ = 0;
  std::shared_ptr<Recording> recording_ = std::make_shared<Recording>();
};

}  // namespace

ort::OrtEpProfilerImpl* make_profiler(const Api& api, std::string device) {
  return new Profiler(api, std::move(device));
}

StepObserver* current_observer() { return watching.empty() ? nullptr : watching.back().get(); }

}  // namespace flownpu
