// SPDX-License-Identifier: Apache-2.0
#include "ops/transformer/decoder_limits.h"

#include "ops/error.h"
#include "ops/transformer/graph/operators.h"

namespace flownpu::transformer {

std::string unsupported(const Attention& attention, const DecoderLimits& limits) {
  if (attention.softcap != 0 && !limits.softcap)
    return "expected no softcap: " + limits.who + " has none";
  if (attention.sinks && !limits.sinks) return "expected no head_sink: " + limits.who + " has none";
  if (attention.qk_norm == QkNorm::kAllHeads && !limits.norms_after)
    return "expected norms of each head, or none: " + limits.means + " have none of all heads";
  if (attention.output_gate && !limits.states)
    return "expected no gate of attention's output: " + limits.means + " have none";
  return "";
}

std::string unsupported(const FeedForward& feed_forward, const DecoderLimits& limits) {
  if (feed_forward.experts == 0 || limits.experts) return "";
  return "a mixture of experts, which " + limits.means +
         " have no place for: what they read is fixed before a token begins, and its router "
         "chooses "
         "the weights";
}

std::string unsupported(const Node& attention, const DecoderLimits& limits) {
  const auto has = [&](std::size_t input) { return attention.input(input) != nullptr; };
  if (has(kKey) && !limits.norms_after)
    return "expected a packed QKV projection, got query, key and value";
  if (!limits.position_ids && has(kPositionIds))
    return "expected no position_ids: " + limits.who +
           "'s tokens follow one another in one table of RoPE (where they choose between two, as "
           "LongRoPE's, convert with a --context-length of the first; what an exporter feeds with "
           "positions is converted without them from the checkpoint itself)";
  if (!limits.attention_bias && has(kAttentionBias)) return "expected no attention_bias";
  if (attention.integer("causal", 1) == 0) return "expected causal = 1";
  if (!limits.without_rope && attention.integer("do_rotary", 0) == 0)
    return "expected do_rotary = 1: " + limits.who +
           "'s attention turns the queries and keys of every layer";
  if (attention.integer("rotary_interleaved", 0) != 0) return "expected rotary_interleaved = 0";
  if (has(kQNormWeight) != has(kKNormWeight))
    return "expected norms of both queries and keys, or none";
  if (!has(kPastKey) || !has(kPastValue)) return "expected past_key and past_value";
  if (!has(kSeqlensK) || !has(kTotalSequenceLength))
    return "expected seqlens_k and total_sequence_length";
  const Value& past = attention.inputs[kPastKey];
  if (!limits.int8_caches && past.type == DataType::kInt8)
    return "expected a KV cache in bf16, fp16 or fp32, got int8: " + limits.who +
           " has none of those (convert with --kv-dtype bf16)";
  if (!limits.batches && past.shape && past.shape->rank() == 4 && (*past.shape)[0] > 1)
    return "expected a batch of one: " + limits.who + " computes one sequence";
  return "";
}

void check_multiple(const Node& node, const char* name, std::int64_t rows,
                    const DecoderLimits& limits) {
  if (rows % limits.multiple == 0) return;
  fail(to_string(node), ": expected a ", name, " in multiples of ", limits.multiple, ", got ", rows,
       ": ", limits.means, " compute so many rows at a time");
}

}  // namespace flownpu::transformer
