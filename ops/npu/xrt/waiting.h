// SPDX-License-Identifier: Apache-2.0
// How a call that is under way is waited for.
//
// XRT's part for NPUs does not say how a wait of its own ended where the driver has given the
// context a timeline (Linux 7): after a time-out, a signal or the loss of the device it goes on as
// if the command had ended. For one command XRT then throws; of a runlist it forgets that it is
// under way. The state that the driver writes into the command's packet is always right. So it is
// what is looked at, between sleeps.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace flownpu::npu::xrt_abi {

// Sleeps before the next look: a part of the time that the call has taken so far, so that what it
// adds to a call is in proportion, and no more than the longest. Numbers are in docs/npu.md.
class Sleeper {
 public:
  using Clock = std::chrono::steady_clock;

  void sleep(Clock::time_point until) {
    const auto now = Clock::now();
    const auto part = std::clamp<Clock::duration>((now - begin_) / kPart, kShortest, kLongest);
    std::this_thread::sleep_for(std::min(part, std::max(until - now, Clock::duration::zero())));
  }
  Clock::duration taken() const { return Clock::now() - begin_; }

 private:
  static constexpr int kPart = 16;
  static constexpr std::chrono::microseconds kShortest{10};
  static constexpr std::chrono::microseconds kLongest{250};

  Clock::time_point begin_ = Clock::now();
};

// How long a call that makes no progress may stay until the driver's watchdog has ended it. Zero:
// the watchdog is off.
std::chrono::milliseconds watchdog_patience();

}  // namespace flownpu::npu::xrt_abi
