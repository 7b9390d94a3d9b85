// SPDX-License-Identifier: Apache-2.0
// What goes wrong in the double of OpenCL's loader, and when.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

#include "ops/gpu/opencl/abi.h"

namespace opencl_double {

namespace cl = flownpu::gpu::cl;

enum class Way : std::uint8_t {
  kNone,
  kOnce,  // the call ends with the code, and does nothing
  kLost,  // and so does all that is given to a queue, or allocated, from then on
  kLate,  // the call succeeds and does nothing; what comes after it ends with the code
  kHung,  // the call succeeds and does nothing; nothing after it ends
};

class Faults {
 public:
  // The nth call of this function from now on, 1: the next. Another fault takes its place.
  void inject(std::string call, std::int64_t nth, Way way, cl::Int code);
  // All is well again, and nothing was counted.
  void reset();

  // A call comes: what becomes of it. kNone: it goes to the loader.
  struct Fate {
    Way way = Way::kNone;
    cl::Int code = 0;
  };
  Fate meet(std::string_view call);
  // The way that has begun.
  Fate begun() const;

  std::int64_t calls(const std::string& call) const;
  // Waits of OpenCL's own while nothing ends, which would be for ever.
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

}  // namespace opencl_double
