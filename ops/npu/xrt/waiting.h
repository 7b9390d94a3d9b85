// SPDX-License-Identifier: Apache-2.0
// How to wait for a call that is under way.
//
// XRT's part for NPUs does not report how its own wait ended if the driver has given the context a
// timeline (Linux 7). After a time-out, a signal or the loss of the device it continues as if the
// command had ended. XRT then throws for a single command, and forgets that a runlist is under way.
// The state that the driver writes into the command's packet is always right. So that state is
// polled, with sleeps in between.
#pragma once

#include <atomic>
#include <chrono>

namespace flownpu::npu::xrt_abi {

// The duration of a dispatch, learnt from earlier ones: each token's dispatches take about as long
// as those of the token before.
class Expectation {
 public:
  using Duration = std::chrono::steady_clock::duration;

  Duration get() const { return expected_; }
  // `overslept`: it had already ended at the first look after the long sleep, so `taken` is too
  // long.
  void learn(Duration taken, bool overslept);

 private:
  std::atomic<Duration> expected_{};
};

// The clock and the sleep of a Sleeper; tests replace them.
class Time {
 public:
  using Clock = std::chrono::steady_clock;

  virtual ~Time() = default;
  virtual Clock::time_point now() const { return Clock::now(); }
  virtual void sleep(Clock::duration duration);
  static Time& real();
};

// Sleeps between two looks at a call: first through most of the expected time at once, so that
// waiting takes almost no CPU time, then for short times. The added delay is in proportion to the
// call's time; docs/npu-first-day.md has measurements, also of another way to wait.
class Sleeper {
 public:
  using Clock = Time::Clock;

  // To be made when the call begins.
  explicit Sleeper(Expectation& expectation, Time& time = Time::real());
  // Sleeps before the next look, but not beyond `until`.
  void sleep(Clock::time_point until);
  // To be called when the call has ended.
  void learn() { expectation_.learn(time_.now() - begin_, is_long_); }

 private:
  Expectation& expectation_;
  Time& time_;
  Clock::time_point begin_;
  Expectation::Duration expected_;
  bool is_long_ = false;  // whether the last sleep was the long one
};

// Parameter of the kernel module: ms without progress after which the driver ends a command; 0:
// never. Only root may read it.
inline constexpr const char* kWatchdog = "/sys/module/amdxdna/parameters/tdr_timeout_ms";

// How long to wait until the driver's watchdog has ended a call that makes no progress. Zero: the
// watchdog is off.
std::chrono::milliseconds watchdog_patience(const std::string& parameter = kWatchdog);

}  // namespace flownpu::npu::xrt_abi
