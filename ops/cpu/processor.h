// SPDX-License-Identifier: Apache-2.0
// What this processor has, by its own account (CPUID, of which compilers' run times know different
// parts), and the system saves the registers of.
#pragma once

namespace flownpu::cpu {

// What the kernels of that name need: AVX2, FMA and F16C; AVX-512 F, BW, VL, DQ, VBMI, VNNI and
// BF16.
bool has_avx2();
bool has_avx512();

// Whether memory is read faster when what comes next is prefetched into L2, not past the outer
// caches into L1: on Intel's processors, whose L1 waits for fewer lines at once.
extern const bool kFetchIntoL2;

// Whether the processor has AMX for int8, and the system lets this process use it.
bool may_use_tiles();

}  // namespace flownpu::cpu
