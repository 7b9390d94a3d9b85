// SPDX-License-Identifier: Apache-2.0
#include "ops/cancellation.h"

#include <utility>

namespace flownpu {
namespace {

thread_local Cancellation* current = nullptr;

}  // namespace

void check_cancelled() {
  if (current != nullptr) current->check();
}

Cancellable::Cancellable(Cancellation* cancellation)
    : before_(std::exchange(current, cancellation)) {}

Cancellable::~Cancellable() { current = before_; }

}  // namespace flownpu
