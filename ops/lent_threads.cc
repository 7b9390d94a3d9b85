// SPDX-License-Identifier: Apache-2.0
#include "ops/lent_threads.h"

#include <utility>

namespace flownpu {
namespace {

thread_local LentThreads* lent = nullptr;

}  // namespace

LentThreads* LentThreads::current() { return lent; }

Lend::Lend(LentThreads* threads) : before_(std::exchange(lent, threads)) {}

Lend::~Lend() { lent = before_; }

}  // namespace flownpu
