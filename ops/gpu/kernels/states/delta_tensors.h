// SPDX-License-Identifier: Apache-2.0
// The tensors and constants that both forms of the gated delta rule have: token by token
// (gated_delta.cc), and in chunks (delta_chunks.cc).
#pragma once

#include <string_view>

#include "ops/gpu/kernels/states/kernels.h"

namespace flownpu::gpu {

// "query", "key" or "value".
TensorDescription given(const DeltaShape& shape, std::string_view name);
// "decay" or "share".
TensorDescription rates_of(const DeltaShape& shape, const char* name);
TensorDescription state_of(const DeltaShape& shape, const char* name, Access access);
TensorDescription result_of(const DeltaShape& shape);
Constants constants_of(const DeltaShape& shape);

}  // namespace flownpu::gpu
