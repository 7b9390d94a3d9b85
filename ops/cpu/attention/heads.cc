// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/attention/heads.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "ops/error.h"
#include "ops/nodes/flow_qkv_attention.h"

namespace flownpu::cpu {
namespace {

std::int64_t integer_or_default(const Node& node, std::string_view name) {
  return node.integer(name, fallback_of<std::int64_t>(kAttentionAttributes, name));
}
float number_or_default(const Node& node, std::string_view name) {
  return node.number(name, fallback_of<float>(kAttentionAttributes, name));
}

// Keys that a layer without a window is assumed to see, for the placement report.
constexpr std::int64_t kNominalKeys = 64;

}  // namespace

AttentionAttributes::AttentionAttributes(const Node& node)
    : name(to_string(node)),
      heads(node.required_integer("num_heads")),
      kv_heads(node.integer("kv_num_heads", heads)),
      head_size(node.required_integer("head_size")),
      scale(number_or_default(node, "scale")),
      softcap(std::max(0.0F, number_or_default(node, "softcap"))),
      window(std::max<std::int64_t>(integer_or_default(node, "local_window_size"), 0)),
      causal(integer_or_default(node, "causal") != 0),
      rotary(integer_or_default(node, "do_rotary") != 0),
      rotary_interleaved(integer_or_default(node, "rotary_interleaved") != 0),
      counted_prompt(integer_or_default(node, "counted_prompt") != 0),
      norm_epsilon(number_or_default(node, "qk_norm_epsilon")),
      window_sized_cache(integer_or_default(node, "sliding_window_cache") != 0) {
  if (heads <= 0 || kv_heads <= 0 || heads % kv_heads != 0) {
    fail("[", name, "] expected num_heads to be a multiple of kv_num_heads, got ", heads, " and ",
         kv_heads);
  }
  if (head_size <= 0 || head_size > kMaxHeadSize) {
    fail("[", name, "] expected head_size in 1..", kMaxHeadSize, ", got ", head_size);
  }
  if (integer_or_default(node, "local_window_size") == 0)
    fail("[", name, "] expected local_window_size above 0, or -1 for none, got 0");
  if (window > 0 && !causal)
    fail("[", name, "] expected no local_window_size with causal = 0, got ", window);
  if (window_sized_cache && window == 0)
    fail("[", name, "] expected local_window_size with sliding_window_cache = 1");
  if (scale == 0.0F) scale = 1.0F / std::sqrt(static_cast<float>(head_size));
}

HeadPreparation head_preparation(const AttentionAttributes& attributes, const Tensor& norm,
                                 const Tensor& cos, const Tensor& sin) {
  const auto* no_table = static_cast<const float*>(nullptr);
  return {.head_size = attributes.head_size,
          .norm = norm.as<const float>(),
          .norm_epsilon = attributes.norm_epsilon,
          .cos = attributes.rotary ? cos.as<const float>() : no_table,
          .sin = attributes.rotary ? sin.as<const float>() : no_table,
          .half = attributes.rotary ? cos.shape[1] : 0,
          .interleaved = attributes.rotary_interleaved};
}

void HeadPreparation::prepare(const Kernels& kernels, float* head, std::int64_t position) const {
  if (norm != nullptr) kernels.rms_norm(head, norm, norm_epsilon, head, head_size);
  if (cos != nullptr)
    kernels.rope(head, cos + position * half, sin + position * half, half, interleaved);
}

void HeadPreparation::prepare_queries(const Kernels& kernels, const float* query,
                                      std::int64_t heads, std::int64_t position, float scale,
                                      float* out) const {
  const std::int64_t elements = heads * head_size;
  std::copy_n(query, elements, out);
  for (std::int64_t i = 0; i < elements; i += head_size) prepare(kernels, out + i, position);
  for (std::int64_t i = 0; i < elements; ++i) out[i] *= scale;
}

std::int64_t attention_multiply_adds(const AttentionAttributes& attributes) {
  const std::int64_t keys = attributes.window > 0 ? attributes.window : kNominalKeys;
  return 2 * attributes.heads * attributes.head_size * keys;
}

}  // namespace flownpu::cpu
