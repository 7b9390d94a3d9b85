// SPDX-License-Identifier: Apache-2.0
// DispatchObserver: is told of what a device is given to do at once while a run is being profiled,
// and of what the host computes in between.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace flownpu {

// In the place of an array: the host computes.
inline constexpr std::string_view kHost = "host";

// Bytes are those that were moved between host and device since the dispatch before that was
// observed, and up to the end of this one: what a dispatch leaves to be read counts for the next.
struct Dispatch {
  std::string array = {};  // what the device was configured as, or kHost
  // Its calls in their order, separated by "; ": names, files of the artifacts (for the host's
  // there are none), positions.
  std::string calls = {};
  std::string files = {};
  std::string positions = {};
  std::int64_t begin_ns = 0;  // std::chrono::steady_clock
  std::int64_t end_ns = 0;
  std::uint64_t bytes_to_device = 0;
  std::uint64_t bytes_to_host = 0;
  std::uint64_t word_bytes = 0;  // of the calls themselves
};

class DispatchObserver {
 public:
  virtual ~DispatchObserver() = default;
  virtual void dispatched(Dispatch dispatch) = 0;
};

// The observer of the run that this thread is in; null if nobody looks on.
DispatchObserver* current_dispatch_observer();

// Sets the thread's observer, which may be null, for as long as it lives.
class ObservedDispatches {
 public:
  explicit ObservedDispatches(DispatchObserver* observer);
  ~ObservedDispatches();
  ObservedDispatches(const ObservedDispatches&) = delete;
  ObservedDispatches& operator=(const ObservedDispatches&) = delete;

 private:
  DispatchObserver* before_;
};

}  // namespace flownpu
