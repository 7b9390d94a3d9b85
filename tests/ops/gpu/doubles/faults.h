// SPDX-License-Identifier: Apache-2.0
// Failures of the doubles of the loaders of OpenCL and Vulkan, and their times.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

namespace loader_double {

enum class Way : std::uint8_t {
  kNone,
  kOnce,  // the call ends with the code, and does nothing
  kLost,  // and so does every later call that submits, waits, allocates or compiles
  kLate,  // the call succeeds and does nothing; marks behind it end with the code
  kHung,  // the call succeeds and does nothing; no later command ends
};

class Faults {
 public:
  // The nth call of this function from now on, 1: the next. Another fault takes its place.
  void inject(std::string call, std::int64_t nth, Way way, std::int32_t code);
  // Forgets the fault and all counts.
  void reset();

  // Called for each call: its fate. kNone: it goes to the real loader.
  struct Fate {
    Way way = Way::kNone;
    std::int32_t code = 0;
  };
  Fate meet(std::string_view call);
  // The fault that has begun; kNone if none has.
  Fate begun() const;

  // How often a function was called since the reset.
  std::int64_t calls(const std::string& call) const;
  // How many blocking calls there were while nothing ends; each would wait for ever.
  std::int64_t endless_waits() const;

 private:
  static bool is_work(std::string_view call);
  static bool waits(std::string_view call);

  mutable std::mutex mutex_;
  std::string call_;
  std::int64_t left_ = 0;
  Fate fate_;
  bool begun_ = false;
  std::map<std::string, std::int64_t, std::less<>> calls_;
  std::int64_t endless_waits_ = 0;
};

Faults& faults();

}  // namespace loader_double
