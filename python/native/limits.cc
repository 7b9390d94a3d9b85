// SPDX-License-Identifier: Apache-2.0
// Binds the part of this machine that the process may use: processors, memory and the speed at
// which it is read, instruction sets.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
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
#include "ops/system/nodes.h"
#include "ops/system/processors.h"
#include "python/native/bindings.h"

namespace nb = nanobind;

namespace flownpu::native {
namespace {

template <typename Value>
std::optional<std::pair<Value, std::string>> pair(std::optional<GroupLimit<Value>> limit) {
  if (!limit) return std::nullopt;
  return std::pair(limit->value, limit->file.string());
}

// A word of each line, in four places at once: two cores of an Emerald Rapids read 1.1 to 1.4 times
// as fast so as in one place.
std::uint64_t read_memory(
    const nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& words) {
  constexpr std::size_t kPlaces = 4;
  constexpr std::size_t kLineWords = 8;
  const std::size_t apart = words.size() / kPlaces;
  const std::uint64_t* word = words.data();
  std::uint64_t all = 0;
  for (std::size_t i = 0; i < apart; i += kLineWords, word += kLineWords)
    all |= word[0] | word[apart] | word[2 * apart] | word[3 * apart];
  return all;
}

}  // namespace

void bind_limits(nb::module_& module) {
  using Path = std::filesystem::path;
  using Numbers = std::vector<int>;
  nb::class_<Processor>(
      module, "Processor",
      "A hardware thread: its number, the smallest number among its core's threads, the node of "
      "the memory near it, and its core's speed, relative to 1024 for the fastest.")
      .def(nb::init<int, int, int, int>(), nb::arg("number"), nb::arg("core"), nb::arg("node") = 0,
           nb::arg("capacity") = kFullCapacity)
      .def_ro("number", &Processor::number)
      .def_ro("core", &Processor::core)
      .def_ro("node", &Processor::node)
      .def_ro("capacity", &Processor::capacity);
  module.def(
      "processors",
      [](const Path& root, const std::optional<Numbers>& numbers) {
        return describe_processors(numbers ? *numbers : allowed_processors(), root);
      },
      nb::arg("root") = "/", nb::arg("numbers") = nb::none(),
      "The processors that this process may run on, or those with these numbers, as the system "
      "describes them. /sys is looked for in `root`.");
  module.def("computing_processors", &computing_processors, nb::arg("processors"),
             "The processors that get a thread each, the fastest first: one of each core, and none "
             "of cores that are less than half as fast as the fastest.");
  module.def(
      "memory_nodes", [](const Path& root) { return memory_nodes(root); }, nb::arg("root") = "/",
      "The nodes of memory that have processors; empty if the system does not tell.");
  module.def(
      "usable_processors",
      [](const Path& root, const std::optional<Numbers>& numbers) {
        return numbers ? usable_processors(root, *numbers) : usable_processors(root);
      },
      nb::arg("root") = "/", nb::arg("numbers") = nb::none(),
      "How many threads can compute at once, by the cores of the process's affinity and the CPU "
      "quota of its control groups. /proc and /sys are looked for in `root`.");
  module.def(
      "processor_quota", [](const Path& root) { return pair(processor_quota(root)); },
      nb::arg("root") = "/",
      "How many processors' worth of time the process's control groups grant, and the file that "
      "says so; None if there is no limit.");
  module.def(
      "memory_limit", [](const Path& root) { return pair(memory_limit(root)); },
      nb::arg("root") = "/",
      "Bytes that the processes of the control group may use together, and the file that says so; "
      "None if there is no limit.");
  module.def("read_memory", &read_memory, nb::arg("words"),
             nb::call_guard<nb::gil_scoped_release>(),
             "Reads each line of an array of uint64 into a core, as fast as it comes; returns the "
             "disjunction of the words that were looked at.");
  module.def(
      "instruction_sets",
      [] {
        std::vector<std::string> names;
        for (const cpu::Kernels* kernels : cpu::available_kernels())
          names.emplace_back(kernels->isa);
        return names;
      },
      "The names of the instruction sets that this processor has and that have kernels, the best "
      "first.");
}

}  // namespace flownpu::native
