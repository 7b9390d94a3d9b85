// SPDX-License-Identifier: Apache-2.0
// Q4NXMatMul on a GPU's matrix units.
#pragma once

#include <vector>

#include "ops/gpu/kernels/kernels.h"

namespace flownpu::gpu {

// Whether the units' sizes divide this kernel's tiles, and its work-groups fit the device.
bool can_multiply(const MatrixUnits& units, const ProductShape& shape, const DeviceFacts& facts);

inline constexpr std::int64_t kMatricesTile = 64;  // tokens of a work-group

// The product of q4nx_matmul, with its arguments and parameter, of which `sums` are not read. The
// factors are rounded to float16: results differ from q4nx_matmul's by at most 2^-9 of the sum of
// the products' magnitudes (q4nx_matmul.cc).
KernelDescription q4nx_matmul_of_matrices(const ProductShape& shape, const MatrixUnits& units);
Grid q4nx_matmul_of_matrices_grid(const ProductShape& shape, std::int64_t tokens);

// The ways to multiply rounded rows, the default first, of which a faster measured one may take the
// place: true is on matrix units, false in q4nx_matmul. Throws Error if they are wanted, and are
// not right; GpuError.
std::vector<bool> ways_with_matrices(GpuMatrices wanted, const ProductShape& shape,
                                     Context& context);

}  // namespace flownpu::gpu
