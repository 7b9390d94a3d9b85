// SPDX-License-Identifier: Apache-2.0
// Attention of a prompt on a GPU's matrix units.
#pragma once

#include <vector>

#include "ops/gpu/kernels/kernels.h"

namespace flownpu::gpu {

// Whether the units' sizes divide the heads' size and this kernel's tiles, and its work-groups fit
// the device. Shapes with a mask, with parts or that append have no such kernel.
bool can_attend(const MatrixUnits& units, const AttentionShape& shape, const DeviceFacts& facts);

// flow_attention, with its arguments and parameters, for shapes that the units can_attend to.
// Queries, keys, values and weights are rounded to float16 (flow_attention.cc says by how much
// results differ); sums are float32.
KernelDescription flow_attention_of_matrices(const AttentionShape& shape, const MatrixUnits& units);
Grid flow_attention_of_matrices_grid(const AttentionShape& shape, const MatrixUnits& units,
                                     std::int64_t batch, std::int64_t tokens);

// The ways to attend, the default first: true is on matrix units, false in flow_attention, which
// computes the shapes that have no such kernel. Throws Error if they are wanted, and are missing or
// not right; GpuError.
std::vector<bool> ways_with_matrices(GpuMatrices wanted, const AttentionShape& shape,
                                     Context& context);

}  // namespace flownpu::gpu
