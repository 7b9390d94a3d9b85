// SPDX-License-Identifier: Apache-2.0
// A double of libxrt_coreutil: the symbols that ops/npu/xrt/ uses, over the emulator. It is strict
// where XRT and its driver are, and where they let a mistake pass that the array would not.
//
// The test steers it through the functions below, with ctypes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#pragma GCC visibility push(default)
extern "C" {
// Where the kernels are that an array of npu2 calls: libflownpu_aie_xdna2.so.
void device_double_use_kernels(const char* library);
// Forgets faults and violations; what is alive stays so.
void device_double_reset();
// The opportunity number `after` (0: the next) of a fault is taken, once:
//   open, context, allocate, move, submit: XRT throws std::system_error of number `amount`
//   error: a call ends in the state `amount` (ert.h)
//   hang: a call does not end; once it was waited for `amount` ms, which take less, the driver's
//     watchdog ends it; -1: it never does
//   lost: the device is gone while a call is waited for
// These hold until device_double_reset():
//   devices: how many there are; version: XRT_VERSION(major, minor)
void device_double_inject(const char* fault, std::int64_t after, std::int64_t amount);
// Lets the driver's watchdog end all calls that hang.
void device_double_end_hung_calls();
// Objects of XRT that are alive; `kind`: "device", "context", "buffer", "run", ..., or "" for all.
std::int64_t device_double_alive(const char* kind);
// What was done that must not be, one a line; cut to `capacity`. How many there were.
std::int64_t device_double_violations(char* text, std::size_t capacity);
}
#pragma GCC visibility pop

namespace device_double {

// Counts objects of a kind while it lives.
class Alive {
 public:
  explicit Alive(const char* kind);
  Alive(const Alive&) = delete;
  Alive& operator=(const Alive&) = delete;
  ~Alive();

 private:
  const char* kind_;
};

void violate(const std::string& what);
// An opportunity for a fault: its amount if it is to be taken.
std::optional<std::int64_t> struck(const std::string& fault);
// What holds until the reset; `otherwise` if nothing does.
std::int64_t setting(const std::string& fault, std::int64_t otherwise);
// Throws std::system_error as XRT does if the fault is to be taken.
void throw_if_struck(const std::string& fault, const std::string& what);
std::string kernel_library();
// Goes up with each device_double_end_hung_calls().
int watchdog_rounds();

}  // namespace device_double
