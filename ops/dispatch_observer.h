// SPDX-License-Identifier: Apache-2.0
// DispatchObserver: receives, while a run is being profiled, every dispatch that a device is given,
// and what the host computes in between.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace flownpu {

// Dispatch::array of what the host computes.
inline constexpr std::string_view kHost = "host";

// Byte counts cover what was moved between host and device from the end of the previously observed
// dispatch to the end of this one: results that are read after a dispatch count for the next.
struct Dispatch {
  std::string array = {};  // what the device was configured as, or kHost
  // The dispatch's calls in order, separated by "; ": names, artifact files (empty for the host),
  // positions.
  std::string calls = {};
  std::string files = {};
  std::string positions = {};
  std::int64_t begin_ns = 0;  // std::chrono::steady_clock
  std::int64_t end_ns = 0;
  std::uint64_t bytes_to_device = 0;
  std::uint64_t bytes_to_host = 0;
  std::uint64_t word_bytes = 0;  // sizes of the calls' words, not of data
};

class DispatchObserver {
 public:
  virtual ~DispatchObserver() = default;
  virtual void dispatched(Dispatch dispatch) = 0;
};

// The observer of the run that this thread executes; null if the run is not being profiled.
DispatchObserver* current_dispatch_observer();

// Sets the calling thread's observer, which may be null, for the lifetime of this object.
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
