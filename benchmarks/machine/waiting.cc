// SPDX-License-Identifier: Apache-2.0
// Ways of waiting for a command, with a thread in the place of a device: how late its end is
// noticed, and what CPU time the wait takes.
#include "ops/npu/xrt/waiting.h"

#include <time.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace {

using flownpu::npu::xrt_abi::Expectation;
using flownpu::npu::xrt_abi::Sleeper;
using Clock = std::chrono::steady_clock;

enum class Way : std::int32_t { kWoken, kSixteenths, kMilliseconds, kLearnt };

std::int64_t nanoseconds(Clock::duration duration) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
}

std::int64_t cpu_time() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

// How many commands have begun, and ended; the end of the last.
struct Device {
  std::atomic<std::int64_t> begun{0}, ended{0};
  Clock::time_point end;
};

void run(Device& device, const std::int64_t* durations, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    device.begun.wait(i);
    std::this_thread::sleep_until(Clock::now() + std::chrono::nanoseconds(durations[i]));
    device.end = Clock::now();
    device.ended = i + 1;
    device.ended.notify_one();
  }
}

void wait(Way way, Device& device, std::int64_t number, Expectation& learnt) {
  Expectation nothing;
  Sleeper sleeper(way == Way::kLearnt ? learnt : nothing);
  while (device.ended <= number) {
    switch (way) {
      case Way::kWoken:
        device.ended.wait(number);
        break;
      case Way::kMilliseconds:
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        break;
      case Way::kSixteenths:
      case Way::kLearnt:
        sleeper.sleep(Clock::time_point::max());
        break;
    }
  }
  sleeper.learn();
}

}  // namespace

// Waits for commands that take `durations` ns, one after the other; of each how many ns late its
// end was noticed, and how many ns of CPU time the wait took.
extern "C" void wait_for_commands(std::int32_t way, const std::int64_t* durations,
                                  std::int64_t count, std::int64_t* late, std::int64_t* cpu) {
  Device device;
  Expectation learnt;
  std::thread thread(run, std::ref(device), durations, count);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t before = cpu_time();
    device.begun = i + 1;
    device.begun.notify_one();
    wait(static_cast<Way>(way), device, i, learnt);
    late[i] = nanoseconds(Clock::now() - device.end);
    cpu[i] = cpu_time() - before;
  }
  thread.join();
}
