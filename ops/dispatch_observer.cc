// SPDX-License-Identifier: Apache-2.0
#include "ops/dispatch_observer.h"

#include <chrono>
#include <new>
#include <utility>

namespace flownpu {
namespace {

thread_local DispatchObserver* current_observer = nullptr;

std::int64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace

DispatchObserver* current_dispatch_observer() { return current_observer; }

ObservedDispatches::ObservedDispatches(DispatchObserver* observer)
    : before_(std::exchange(current_observer, observer)) {}

ObservedDispatches::~ObservedDispatches() { current_observer = before_; }

HandOver::HandOver(std::string_view what, std::int64_t first, std::int64_t end) {
  if (current_dispatch_observer() == nullptr) return;
  dispatch_.array = kHandOver;
  dispatch_.calls = what;
  dispatch_.positions = std::to_string(first) + "-" + std::to_string(end - 1);
  dispatch_.begin_ns = now_ns();
}

HandOver::~HandOver() {
  DispatchObserver* observer = current_dispatch_observer();
  if (observer == nullptr || dispatch_.bytes_to_device + dispatch_.bytes_to_host == 0) return;
  dispatch_.end_ns = now_ns();
  try {
    observer->dispatched(std::move(dispatch_));
  } catch (const std::bad_alloc&) {  // The profile lacks an event; the run does not need it.
    return;
  }
}

}  // namespace flownpu
