// SPDX-License-Identifier: Apache-2.0
// Decoders with a paged KV cache, written by python/flownpu/convert/graph/paged_decoder.py. The
// matcher reads their PagedAttention as a FlowQKVAttention that has one more input, the table of
// blocks, and whose lengths are those of PagedAttention.
#pragma once

#include <string_view>
#include <vector>

#include "ops/nodes/node.h"
#include "ops/transformer/graph/walk.h"

namespace flownpu::transformer {

// The attribute, 1, of a node DecoderLayers (decoder.h) whose caches are paged. Its inputs are
// hidden f32 [N, D], cumulative_sequence_lengths int32 [B + 1], past_sequence_lengths int32 [B],
// the caches of each layer [P, S, G, d], block_table int32 [B, M], all as PagedAttention has them
// (ops/nodes/paged_attention.h), then the device's own; its outputs logits f32 [B, V] and the
// caches.
inline constexpr std::string_view kPaged = "paged";

// The nodes with each PagedAttention in that form: total_sequence_length is
// cumulative_sequence_lengths, seqlens_k is past_sequence_lengths.
std::vector<Node> with_flow_attention(std::vector<Node> nodes);
// The table of blocks of an attention in that form; null for any other.
const Value* block_table(const Node& attention);
// Throws Error unless the Gather `selection` selects each sequence's last token, whose index is
// boundaries[1:] - 1.
void check_last_tokens(const GraphWalk& graph, const Node& selection, std::string_view boundaries);

}  // namespace flownpu::transformer
