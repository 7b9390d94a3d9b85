// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/xrt/waiting.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <thread>

namespace flownpu::npu::xrt_abi {
namespace {

using std::chrono::milliseconds;

// The watchdog's time in Linux 7, if the parameter cannot be read.
constexpr milliseconds kDefault{2000};
// Drivers without the parameter take 6 s, 16 s or a minute. A call that takes longer than this
// limit is kept, and freed after its end is found.
constexpr milliseconds kUnknown{15000};
// Time for the driver to start the context anew.
constexpr milliseconds kRecovery{1000};

// Linux adds 50 us to each sleep, so this one takes 60. The longest sleep bounds the delay of a
// call with unknown duration.
constexpr std::chrono::microseconds kShortest{10};
constexpr std::chrono::microseconds kLongest{250};
// The long sleep leaves out this part of the expected time, because dispatches differ. A short
// sleep is this part of the time since the long sleep's end, plus the square of this part of the
// long sleep.
constexpr int kPart = 16;

}  // namespace

void Expectation::learn(Duration taken, bool overslept) {
  const Duration expected = expected_;
  if (expected == Duration::zero()) {
    expected_ = taken;
  } else if (overslept) {
    expected_ = expected - expected / 4;
  } else {
    // One slow dispatch says little about the next one.
    expected_ = std::min(taken, expected + expected / 4);
  }
}

void Time::sleep(Clock::duration duration) { std::this_thread::sleep_for(duration); }

Time& Time::real() {
  static Time time;
  return time;
}

Sleeper::Sleeper(Expectation& expectation, Time& time)
    : expectation_(expectation), time_(time), begin_(time.now()), expected_(expectation.get()) {}

void Sleeper::sleep(Clock::time_point until) {
  const auto now = time_.now();
  const auto taken = now - begin_;
  const auto quiet = expected_ - expected_ / kPart;
  is_long_ = taken < quiet;
  auto part = is_long_
                  ? quiet - taken
                  : std::clamp<Clock::duration>((taken - quiet) / kPart + quiet / (kPart * kPart),
                                                kShortest, kLongest);
  time_.sleep(std::min(part, std::max(until - now, Clock::duration::zero())));
}

milliseconds watchdog_patience(const std::string& parameter) {
  // Not std::filesystem: this plugin uses XRT's C++ run time, of which wheels may require little.
  if (::access(parameter.c_str(), F_OK) != 0) return kUnknown;
  milliseconds limit = kDefault;
  if (milliseconds::rep read = 0; std::ifstream(parameter) >> read) limit = milliseconds(read);
  if (limit.count() == 0) return limit;
  // A driver that checks at intervals ends a command at the end of the interval after the one in
  // which the command began.
  return 2 * limit + kRecovery;
}

}  // namespace flownpu::npu::xrt_abi
