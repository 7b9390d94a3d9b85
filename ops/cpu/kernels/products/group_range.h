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
};

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
