// SPDX-License-Identifier: Apache-2.0
// DispatchObserver: receives every dispatch to a device, and the host's work between dispatches,
// while a run is profiled.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace flownpu {

// Dispatch::array of what the host computes.
inline constexpr std::string_view kHost = "host";
// Dispatch::array of keys and values that are copied from where another device left them.
inline constexpr std::string_view kHandOver = "hand-over";

// Byte counts cover the moves between host and device after the previous dispatch up to the end of
// this one. Results that are read after a dispatch count for the next one.
struct Dispatch {
  std::string array = {};  // the device's configuration, or kHost
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

// Reports positions first .. end - 1 of a KV cache as handed over when it is destroyed, if the run
// is profiled and any bytes were copied.
class HandOver {
 public:
  // `what`: "the caller's tensors to the device".
  HandOver(std::string_view what, std::int64_t first, std::int64_t end);
  ~HandOver();
  HandOver(const HandOver&) = delete;
  HandOver& operator=(const HandOver&) = delete;

  void to_device(std::size_t bytes) { dispatch_.bytes_to_device += bytes; }
  void to_host(std::size_t bytes) { dispatch_.bytes_to_host += bytes; }

 private:
  Dispatch dispatch_;
};

}  // namespace flownpu
