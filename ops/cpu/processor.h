// SPDX-License-Identifier: Apache-2.0
// What kernels ask about the processor that no instruction set tells.
#pragma once

namespace flownpu::cpu {

// Whether memory is read faster when what comes next is prefetched into L2, not past the outer
// caches into L1: on Intel's processors, whose L1 waits for fewer lines at once.
extern const bool kFetchIntoL2;

// Whether the processor has AMX for int8, and the system lets this process use it: asks for leave,
// which Linux gives (since 5.16) unless a thread has an alternate signal stack too small for the
// state of tiles.
bool may_use_tiles() noexcept;

}  // namespace flownpu::cpu
