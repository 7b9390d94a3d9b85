// SPDX-License-Identifier: Apache-2.0
#include "ops/dispatch_observer.h"

#include <utility>

namespace flownpu {
namespace {

thread_local DispatchObserver* current_observer = nullptr;

}  // namespace

DispatchObserver* current_dispatch_observer() { return current_observer; }

ObservedDispatches::ObservedDispatches(DispatchObserver* observer)
    : before_(std::exchange(current_observer, observer)) {}

ObservedDispatches::~ObservedDispatches() { current_observer = before_; }

}  // namespace flownpu
