// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/match/decoder_layers.h"

#include "ops/formats/q4nx.h"
#include "ops/layers/decoder_matcher.h"
#include "ops/layers/operators.h"
#include "ops/npu/nodes/decoder_shape.h"
#include "ops/npu/nodes/lowered_node.h"
#include "ops/npu/weights/pack_decoder.h"

namespace flownpu::npu {

bool is_for_array(const Node& node) {
  return layers::is_projection(node) || layers::is_attention(node) ||
         layers::is(node, kDomain, "Q4NXMoE");
}

std::vector<Node> with_decoder_layers(const std::vector<Node>& nodes,
                                      const std::vector<std::string>& outputs) {
  static const layers::DecoderLimits limits{.who = "the array",
                                            .means = "the array's designs",
                                            .without_rope = true,
                                            .multiple = q4nx::kBlockRows};
  const layers::GraphWalk graph(nodes, outputs);
  const layers::FoundDecoder found = layers::find_decoder(nodes, graph, limits);
  Node node = found.node(kNpuDomain);
  node.packed = pack(DecoderShape{found.sizes}, found.constants);
  return layers::with_one_node(nodes, graph, found.taken, found.head, node, outputs);
}

}  // namespace flownpu::npu
