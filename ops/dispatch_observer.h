// SPDX-License-Identifier: Apache-2.0
// DispatchObserver: is told of what a device is given to do at once while a run is being profiled.
#pragma once

#include <cstdint>
#include <string>

namespace flownpu {

// Bytes are those that were moved between host and device since the dispatch before that was
// observed, and up to the end of this one: what a dispatch leaves to be read counts for the next.
struct Dispatch {
  std::string array;  // what the device was configured as
  // Of its calls in their order, separated by "; ": names, files of the artifacts, positions.
  std::string calls;
  std::string files;
  std::string positions;
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

// Of the run that this thread is in; null if nobody looks on.
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
