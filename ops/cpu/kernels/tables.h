// SPDX-License-Identifier: Apache-2.0
// Each source of this folder fills its part of the table of one instruction set.
#pragma once

#include "ops/cpu/kernels.h"

namespace flownpu::cpu::FLOWNPU_ISA {

void fill_q4nx_matmul(Kernels& kernels);
void fill_dense_matmul(Kernels& kernels);
void fill_product_epilogue(Kernels& kernels);
void fill_elementwise(Kernels& kernels);
void fill_attention(Kernels& kernels);
void fill_recurrence(Kernels& kernels);
void fill_channels_last(Kernels& kernels);
void fill_winograd(Kernels& kernels);

// The whole table.
const Kernels& kernels();

}  // namespace flownpu::cpu::FLOWNPU_ISA
