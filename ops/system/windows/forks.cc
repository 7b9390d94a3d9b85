// SPDX-License-Identifier: Apache-2.0
#include "ops/system/forks.h"

namespace flownpu {

std::uint32_t forks() { return 0; }

void in_forked_children(void (* /*act*/)()) {}

}  // namespace flownpu
