// SPDX-License-Identifier: Apache-2.0
#include "ops/dispatch_observer.h"

#include <utility>

namespace flownpu {
namespace {

thread_local DispatchObserver* current = nullptr;

}  // namespace

DispatchObserver* current_dispatch_observer() { return current; }

ObservedDispatches::ObservedDispatches(DispatchObserver* observer)
    : before_(std::exchange(current, observer)) {}

ObservedDispatches::~ObservedDispatches() { current = before_; }

}  // namespace flownpu
