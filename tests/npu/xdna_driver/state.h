// SPDX-License-Identifier: Apache-2.0
// The interface through which tests inject failures into the double of the driver, and read its
// reports: they call these functions through ctypes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#pragma GCC visibility push(default)
extern "C" {
// Sets the library with the kernels that arrays call, such as libflownpu_aie_xdna2.so. The
// environment variable XDNA_DRIVER_KERNELS does the same, and XDNA_DRIVER_SETTINGS has settings as
// for xdna_driver_inject.
void xdna_driver_use_kernels(const char* library);
// Forgets violations and all faults but those of the environment; open objects stay open.
void xdna_driver_reset();
// Makes a fault happen once, at its opportunity number `after` (0: the next one):
//   open, lock memory, heap, context, allocate, command, move, submit: the request fails with error
//     number `amount`; command: the memory of a command, which is XRT's own
//   delay: a call takes `amount` us more
//   error: a call ends in the state `amount` (XRT's ert.h)
//   hang: a call does not end; after `amount` ms the driver's watchdog ends it; -1: it never does
//   lost: a call does not end, and the device is gone while it hangs
// These are settings, which hold until xdna_driver_reset():
//   contexts: how many there may be; version: of XRT, XRT_VERSION(major, minor)
//   forbidden: 1: this user may not open the device file, even as root
//   protocol: the firmware's, 1000 * major + minor, which decides what the driver asks of it
//   timelines: 0: a context has none, and is waited for with a request of the driver's own
//   call: ms that a call counts for, without taking them; watchdog: ms of a command's calls, all of
//     a chain's together, after which it is ended; not set: any number
//   separate: 1: the array has memory of its own, and data is moved only by a request to the driver
void xdna_driver_inject(const char* fault, std::int64_t after, std::int64_t amount);
// Lets the driver's watchdog end all calls that hang.
void xdna_driver_end_hung_calls();
// Waits until the driver's threads hold no command; they hold one for a moment after the program
// has seen it end. Returns 0 if they still do after this many milliseconds, else 1.
std::int32_t xdna_driver_settle(std::int64_t milliseconds);
// How many objects are open; `kind`: "file", "context", "buffer", "job", ..., or "" for all.
std::int64_t xdna_driver_alive(const char* kind);
// Writes what the program did and must not do to `text`, one a line, cut to `capacity` bytes;
// returns how many such violations there were.
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
// Called at each opportunity for a fault: its amount if it happens now.
std::optional<std::int64_t> struck(const std::string& fault);
// The amount of a setting; `otherwise` if it is not set.
std::int64_t setting(const std::string& fault, std::int64_t otherwise);
std::string kernel_library();
// The folder with the test's /sys and /dev; empty: nothing is redirected, and there is no double.
const std::string& machine_root();
// Goes up with each xdna_driver_end_hung_calls().
int watchdog_rounds();

}  // namespace xdna_driver
