// SPDX-License-Identifier: Apache-2.0
// What tests tell the double of the driver to do wrong, and what it tells them. They steer it
// through the functions below, with ctypes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#pragma GCC visibility push(default)
extern "C" {
// Where the kernels are that an array calls: libflownpu_aie_xdna2.so. In place of it, and of
// xdna_driver_inject, the environment may have XDNA_DRIVER_KERNELS and XDNA_DRIVER_SETTINGS.
void xdna_driver_use_kernels(const char* library);
// Forgets faults, but those of the environment, and violations; what is alive stays so.
void xdna_driver_reset();
// The opportunity number `after` (0: the next) of a fault is taken, once:
//   open, lock memory, heap, context, allocate, command, move, submit: the request fails with error
//     number `amount`; command: the memory of a command, which is XRT's own
//   delay: a call takes `amount` us more
//   error: a call ends in the state `amount` (XRT's ert.h)
//   hang: a call does not end; after `amount` ms the driver's watchdog ends it; -1: it never does
//   lost: a call does not end, and the device is gone while it hangs
// These hold until xdna_driver_reset():
//   contexts: how many there may be; version: of XRT, XRT_VERSION(major, minor)
//   forbidden: 1: the device file is not for this user, whom nobody asks for root's rights
//   protocol: the firmware's, 1000 * major + minor: what the driver asks of it
//   timelines: 0: a context has none, and is waited for with a request of the driver's own
//   separate: 1: the array has memory of its own, which is moved only where the driver is asked to
void xdna_driver_inject(const char* fault, std::int64_t after, std::int64_t amount);
// Lets the driver's watchdog end all calls that hang.
void xdna_driver_end_hung_calls();
// Waits until the driver's threads hold nothing of any command, which they do for a moment after
// the program has seen it end. 0: after so many milliseconds they still did.
std::int32_t xdna_driver_settle(std::int64_t milliseconds);
// What is open; `kind`: "file", "context", "buffer", "job", ..., or "" for all.
std::int64_t xdna_driver_alive(const char* kind);
// What was done that must not be, one a line; cut to `capacity`. How many there were.
std::int64_t xdna_driver_violations(char* text, std::size_t capacity);
}
#pragma GCC visibility pop

namespace xdna_driver {

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
std::string kernel_library();
// The folder in which the test has this machine's /sys and /dev; empty: this is no machine of ours.
const std::string& machine_root();
// Goes up with each xdna_driver_end_hung_calls().
int watchdog_rounds();

}  // namespace xdna_driver
