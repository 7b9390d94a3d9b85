// SPDX-License-Identifier: Apache-2.0
// What of this machine the process may use.
#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/cpu/kernels.h"
#include "ops/system/machine_limits.h"
#include "python/native/bindings.h"

namespace nb = nanobind;

namespace flownpu::native {
namespace {

template <typename Value>
std::optional<std::pair<Value, std::string>> pair(std::optional<GroupLimit<Value>> limit) {
  if (!limit) return std::nullopt;
  return std::pair(limit->value, limit->file.string());
}

}  // namespace

void bind_limits(nb::module_& module) {
  using Path = std::filesystem::path;
  module.def(
      "usable_processors", [](const Path& root) { return usable_processors(root); },
      nb::arg("root") = "/",
      "How many threads can compute at once: the process's affinity, and its groups' CPU quota. "
      "/proc and /sys are "
      "looked for in `root`.");
  module.def(
      "processor_quota", [](const Path& root) { return pair(processor_quota(root)); },
      nb::arg("root") = "/",
      "How many processors' worth of time the process's control groups grant, and the file that "
      "says so; None: any.");
  module.def(
      "memory_limit", [](const Path& root) { return pair(memory_limit(root)); },
      nb::arg("root") = "/",
      "Bytes that the processes of the control group may use together, and the file that says so; "
      "None: any.");
  module.def(
      "instruction_sets",
      [] {
        std::vector<std::string> names;
        for (const cpu::Kernels* kernels : cpu::available_kernels())
          names.emplace_back(kernels->isa);
        return names;
      },
      "The names of the instruction sets that there are kernels for and this processor has, the "
      "best "
      "first.");
}

}  // namespace flownpu::native
