// SPDX-License-Identifier: Apache-2.0
#include "tests/npu/xdna_driver/state.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <vector>

namespace xdna_driver {
namespace {

struct Fault {
  std::string name;
  std::int64_t after;
  std::int64_t amount;
};

// The value of an environment variable; empty if it is not set.
std::string variable(const char* name) {
  const char* const given = std::getenv(name);
  return given == nullptr ? "" : given;
}

// The settings of this process, such as "timelines=0 separate=1", until a test changes them.
std::vector<Fault> settings() {
  std::vector<Fault> found;
  std::istringstream given(variable("XDNA_DRIVER_SETTINGS"));
  for (std::string setting; given >> setting;) {
    const std::size_t end = setting.find('=');
    found.push_back({setting.substr(0, end), 0, std::stoll(setting.substr(end + 1))});
  }
  return found;
}

struct State {
  std::mutex mutex;
  std::string kernels = variable("XDNA_DRIVER_KERNELS");
  std::vector<Fault> faults = settings();
  std::vector<std::string> violations;
  std::map<std::string, std::int64_t> alive;
  std::condition_variable gone;  // an object was destroyed
  int watchdog_rounds = 0;
};

// Never destroyed: objects that the plugin abandoned may live until the process ends.
State& state() {
  static auto* instance = new State;
  return *instance;
}

bool holds(const std::string& name) {
  return name == "contexts" || name == "version" || name == "forbidden" || name == "protocol" ||
         name == "timelines" || name == "separate" || name == "call" || name == "watchdog";
}

}  // namespace

Alive::Alive(const char* kind) : kind_(kind) {
  const std::lock_guard lock(state().mutex);
  ++state().alive[kind_];
}

Alive::~Alive() {
  const std::lock_guard lock(state().mutex);
  --state().alive[kind_];
  state().gone.notify_all();
}

void violate(const std::string& what) {
  const std::lock_guard lock(state().mutex);
  state().violations.push_back(what);
}

std::optional<std::int64_t> struck(const std::string& fault) {
  const std::lock_guard lock(state().mutex);
  auto& faults = state().faults;
  const auto found =
      std::find_if(faults.begin(), faults.end(), [&](const Fault& f) { return f.name == fault; });
  if (found == faults.end() || found->after-- > 0) return std::nullopt;
  const std::int64_t amount = found->amount;
  faults.erase(found);
  return amount;
}

std::int64_t setting(const std::string& fault, std::int64_t otherwise) {
  const std::lock_guard lock(state().mutex);
  for (const Fault& set : state().faults) {
    if (set.name == fault) return set.amount;
  }
  return otherwise;
}

std::string kernel_library() {
  const std::lock_guard lock(state().mutex);
  return state().kernels;
}

const std::string& machine_root() {
  static const std::string folder = variable("XDNA_DRIVER_ROOT");
  return folder;
}

int watchdog_rounds() {
  const std::lock_guard lock(state().mutex);
  return state().watchdog_rounds;
}

}  // namespace xdna_driver

using xdna_driver::state;

void xdna_driver_use_kernels(const char* library) {
  const std::lock_guard lock(state().mutex);
  state().kernels = library;
}

void xdna_driver_reset() {
  const std::lock_guard lock(state().mutex);
  state().faults = xdna_driver::settings();
  state().violations.clear();
}

void xdna_driver_inject(const char* fault, std::int64_t after, std::int64_t amount) {
  const std::lock_guard lock(state().mutex);
  if (xdna_driver::holds(fault)) {
    std::erase_if(state().faults, [&](const auto& set) { return set.name == fault; });
  }
  state().faults.push_back({fault, after, amount});
}

void xdna_driver_end_hung_calls() {
  const std::lock_guard lock(state().mutex);
  ++state().watchdog_rounds;
}

std::int32_t xdna_driver_settle(std::int64_t milliseconds) {
  std::unique_lock lock(state().mutex);
  return state().gone.wait_for(lock, std::chrono::milliseconds(milliseconds),
                               [] { return state().alive["job"] == 0; });
}

std::int64_t xdna_driver_alive(const char* kind) {
  const std::lock_guard lock(state().mutex);
  std::int64_t count = 0;
  for (const auto& [name, alive] : state().alive) {
    if (*kind == '\0' || name == kind) count += alive;
  }
  return count;
}

std::int64_t xdna_driver_violations(char* text, std::size_t capacity) {
  const std::lock_guard lock(state().mutex);
  std::string all;
  for (const std::string& violation : state().violations) all += violation + "\n";
  const std::size_t length = std::min(all.size(), capacity - 1);
  std::memcpy(text, all.data(), length);
  text[length] = '\0';
  return static_cast<std::int64_t>(state().violations.size());
}
