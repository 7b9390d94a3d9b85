// SPDX-License-Identifier: Apache-2.0
// What this processor has: x86's by its own account (CPUID, of which compilers' run times know
// different parts), and the system saves the registers of; Arm's by the system's.
#pragma once

namespace flownpu {

// AVX2, FMA and F16C; AVX-512 F, BW, VL, DQ, VBMI, VNNI and BF16.
bool has_avx2();
bool has_avx512();

// Armv8.2's dot products of bytes (FEAT_DotProd); and with them Armv8.6's products of matrices of
// bytes (FEAT_I8MM).
bool has_dot_products();
bool has_int8_matrices();

// Whether memory is read faster when what comes next is prefetched into L2, not past the outer
// caches into L1: on Intel's processors, whose L1 waits for fewer lines at once.
extern const bool kFetchIntoL2;

// Whether keys and values of a decode step are read faster a page of each in turn than four: on Zen
// 4 (and 3, of the same family, on which it was not measured).
extern const bool kAlternateByPages;

// Whether the processor has AMX for int8, and the system lets this process use it.
bool may_use_tiles();

}  // namespace flownpu
