// SPDX-License-Identifier: Apache-2.0
// Groups of columns of a weight whose codes are unpacked together.
#pragma once

#include "ops/cpu/q4nx_rows.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

struct GroupRange {
  Q4NXRows weight;
  std::int64_t first_group;
  std::int64_t groups;

  // The weight with a layout that is known at compile time.
  template <q4nx::Layout LAYOUT>
  Q4NXRows rows() const {
    Q4NXRows known = weight;
    known.layout = LAYOUT;
    return known;
  }
};

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
