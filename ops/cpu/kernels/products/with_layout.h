// SPDX-License-Identifier: Apache-2.0
// Kernels that read a weight once are compiled for each layout of it; this chooses one.
#pragma once

#include "ops/formats/q4nx.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// Calls function.template operator()<LAYOUT>() for one of the layouts that q4nx::layout_of finds.
// With a layout that is known, a group is a fixed step from the one before it, and its minima are
// no branch: two threads of a Zen 5 multiplied weights in a cache at 64 to 71 GB/s with AVX2, not
// at 43 to 50, and at 104 to 111 with AVX-512, not at 99 to 108.
template <typename Function>
void with_layout(const q4nx::Layout& layout, const Function& function) {
  if (layout == q4nx::kSymmetric) return function.template operator()<q4nx::kSymmetric>();
  if (layout == q4nx::kNarrow) return function.template operator()<q4nx::kNarrow>();
  function.template operator()<q4nx::kWide>();
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
