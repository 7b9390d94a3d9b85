// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/kernels/tables.h"

#define FLOWNPU_TEXT_OF(name) #name
#define FLOWNPU_TEXT(macro) FLOWNPU_TEXT_OF(macro)

namespace flownpu::cpu::FLOWNPU_ISA {

const Kernels& kernels() {
  static const Kernels table = [] {
    Kernels filled{};
    filled.isa = FLOWNPU_TEXT(FLOWNPU_ISA);
    fill_q4nx_matmul(filled);
    fill_dense_matmul(filled);
    fill_product_epilogue(filled);
    fill_elementwise(filled);
    fill_attention(filled);
    fill_recurrence(filled);
    fill_channels_last(filled);
    fill_winograd(filled);
    return filled;
  }();
  return table;
}

}  // namespace flownpu::cpu::FLOWNPU_ISA
