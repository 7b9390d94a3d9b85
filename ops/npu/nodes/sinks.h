// SPDX-License-Identifier: Apache-2.0
// The sinks of attention as the array reads them (aie/designs/attention.py): bf16 elements, in
// which each KV head has d, and 128 of padding. A KV head's d hold, for each of its query heads,
// m f32[group] and l f32[group]: the sink's score t = sink log2(e), rounded up to an integer, and
// 2^(t - m).
#pragma once

#include <cstdint>
#include <span>

#include "ops/npu/nodes/lowered_node.h"

namespace flownpu::npu {

// Elements of the sinks of a layer, or of an attention by itself.
std::int64_t sink_elements(std::int64_t kv_heads, std::int64_t head_size);

// Writes them. `sinks`: those of all query heads; one of -infinity has no share of the denominator.
// Throws Error for more than d / 4 query heads to a KV head.
void write_sinks(std::span<const float> sinks, std::int64_t kv_heads, std::int64_t head_size,
                 PackedWriter& writer);

}  // namespace flownpu::npu
