// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/operators/step.h"

#include <algorithm>
#include <array>

namespace flownpu::gpu {

std::span<const Operator> operators() {
  static constexpr std::array<Operator, 11> kOperators{
      {{"Q4NXMatMul", make_product},
       {"FusedDQP", make_product},
       {"DenseMatMul", make_dense_product},
       {"Q4NXGather", make_gather},
       {"FlowQKVAttention", make_attention},
       {"FlowKVAttention", make_attention},
       {"SimplifiedLayerNormalization", make_rms_norm},
       {"RMSNormalization", make_rms_norm},
       {"SkipSimplifiedLayerNormalization", make_rms_norm},
       {"RotaryEmbedding", make_rotary_embedding},
       {"ArgMax", make_argmax}}};
  return kOperators;
}

const Operator* find_operator(std::string_view op_type) {
  const auto found = std::ranges::find(operators(), op_type, &Operator::op_type);
  return found == operators().end() ? nullptr : &*found;
}

}  // namespace flownpu::gpu
