// SPDX-License-Identifier: Apache-2.0
// Loop hints for the compilers for the array; they are empty for others. A compiler pipelines a
// loop only if it knows a minimum number of turns. Hints never change a result. Spellings as in
// mlir-aie's aie_kernels/aie_kernel_utils.h
// (__AIECC__ is Peano).
#pragma once

#if defined(__chess__)
#define AIE_LOOP_MIN_ITERATION_COUNT(count) [[chess::min_loop_count(count)]]
#define AIE_PREPARE_FOR_PIPELINING [[chess::prepare_for_pipelining]]
#define AIE_LOOP_UNROLL_FULL [[chess::unroll_loop()]]
#elif defined(__AIECC__)
#define FLOWNPU_PRAGMA(text) _Pragma(#text)
#define AIE_LOOP_MIN_ITERATION_COUNT(count) FLOWNPU_PRAGMA(clang loop min_iteration_count(count))
#define AIE_PREPARE_FOR_PIPELINING
#define AIE_LOOP_UNROLL_FULL _Pragma("clang loop unroll(full)")
#else
#define AIE_LOOP_MIN_ITERATION_COUNT(count)
#define AIE_PREPARE_FOR_PIPELINING
#define AIE_LOOP_UNROLL_FULL
#endif
