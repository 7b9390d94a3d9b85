// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <vector>

#include "ops/npu/xrt/waiting.h"
#include "tests/npu/bindings.h"

namespace nb = nanobind;

namespace {

using flownpu::npu::xrt_abi::Expectation;
using flownpu::npu::xrt_abi::Sleeper;
using std::chrono::nanoseconds;

// A clock that only sleeps move on, each by exactly its duration.
class SleptTime final : public flownpu::npu::xrt_abi::Time {
 public:
  Clock::time_point now() const override { return now_; }
  void sleep(Clock::duration duration) override {
    sleeps.push_back(std::chrono::duration_cast<nanoseconds>(duration).count());
    now_ += duration;
  }
  std::vector<std::int64_t> sleeps;

 private:
  Clock::time_point now_{};
};

// Waits for a call that takes `taken` ns, and returns the sleeps in ns; the expectation learns from
// it. A sleep ends where the device is to be checked, `check` ns after the last time.
std::vector<std::int64_t> wait(Expectation& expectation, std::int64_t taken, std::int64_t check) {
  SleptTime time;
  const auto begin = time.now();
  Sleeper sleeper(expectation, time);
  auto next_check = begin + nanoseconds(check);
  while (time.now() - begin < nanoseconds(taken)) {
    if (time.now() >= next_check) next_check = time.now() + nanoseconds(check);
    sleeper.sleep(next_check);
  }
  sleeper.learn();
  return time.sleeps;
}

}  // namespace

void bind_waiting(nb::module_& module) {
  nb::class_<Expectation>(module, "Expectation")
      .def(nb::init<>())
      .def_prop_ro("nanoseconds",
                   [](const Expectation& expectation) {
                     return std::chrono::duration_cast<nanoseconds>(expectation.get()).count();
                   })
      .def(
          "learn",
          [](Expectation& expectation, std::int64_t taken, bool overslept) {
            expectation.learn(nanoseconds(taken), overslept);
          },
          nb::arg("taken"), nb::arg("overslept") = false)
      .def("wait", wait, nb::arg("taken"), nb::arg("check") = 100'000'000);
  module.def(
      "watchdog_patience",
      [](const std::filesystem::path& parameter) {
        return flownpu::npu::xrt_abi::watchdog_patience(parameter).count();
      },
      nb::arg("parameter"));
}
