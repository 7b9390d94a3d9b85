// SPDX-License-Identifier: Apache-2.0
// The features of this processor. On x86 they are read with CPUID, since compilers' runtimes know
// different subsets, and only count if the system saves the registers they need; on Arm the system
// reports them.
#pragma once

namespace flownpu {

// Whether the processor has AVX2, FMA and F16C; and AVX-512 F, BW, VL, DQ, VBMI, VNNI and BF16.
bool has_avx2();
bool has_avx512();

// Whether it has Armv8.2's dot products of bytes (FEAT_DotProd); and, in addition to these,
// Armv8.6's matrix products of bytes (FEAT_I8MM).
bool has_dot_products();
bool has_int8_matrices();

// Whether memory is read faster if it is prefetched into L2 instead of L1: true on Intel's
// processors, whose L1 can wait for fewer lines at once.
extern const bool kFetchIntoL2;

// Whether a decode step reads keys and values faster if it alternates between them after one page
// than after four: true on Zen 4 (and Zen 3, which has the same family number and was not
// measured).
extern const bool kAlternateByPages;

// Whether dot products of pairs of bf16 have half the rate of f32's multiply-adds, and whether
// moving numbers from vectors to tiles and back takes longer than vectors take for 16 rows: true on
// the first two generations of processors with AMX, Sapphire Rapids and Emerald Rapids, whose cores
// are of one kind. An Emerald Rapids was measured.
extern const bool kMultipliesFloatFaster;
extern const bool kMovesTilesSlowly;

// Whether the processor has AMX for int8 and bf16, and the system lets this process use it.
bool may_use_tiles();

}  // namespace flownpu
