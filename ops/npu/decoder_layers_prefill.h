// SPDX-License-Identifier: Apache-2.0
// PrefillCalls: a prompt's tokens through all layers, a chunk at a time, operator by operator:
//
//   rms_norm -> [ dequant_engine, gemm (QKV) -> norm_rope (-> KV cache) -> flow_qkv
//                 -> dequant_engine, gemm (output) -> residual
//                 -> dequant_engine, gemm (gate, up) -> dequant_engine, gemm (down) -> residual ]
//   residual: with post-norms rms_norm_add, then rms_norm; without, add_rms_norm
//
// Activations stay on the device from the embeddings to the last layer's keys and values, with
// which it ends: what a prompt's last token needs of the others is the cache. The same in Python:
// tests/aie/prefill_layer.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ops/npu/call_list.h"
#include "ops/npu/decoder_layers_decode.h"
#include "ops/npu/decoder_shape.h"

namespace flownpu::npu {

class PrefillCalls {
 public:
  // Of chunks of every size that the artifacts have, for caches of `context` positions. None is no
  // error: prompts then go token by token. Throws DeviceError (kArtifact) if some of a chunk's
  // calls are missing.
  PrefillCalls(std::shared_ptr<CompiledDesigns> designs, const DecoderShape& shape,
               std::int64_t context);

  // Makes the buffers of a chunk; checks all against the artifacts.
  void bind(const DecoderBuffers& buffers);

  // Sizes of chunks, the smallest first.
  std::vector<std::int64_t> sizes() const;
  // Of `left` tokens from `position` on, how many go next; 0: they go token by token, being too few
  // for a chunk, or because every chunk would pass the end of the context.
  std::int64_t next(std::int64_t left, std::int64_t position);
  // As many tokens as next() said, `hidden` [tokens, D], from `position` on: their keys and values
  // are appended to `cache`. Throws DeviceFailed.
  void run(std::span<const float> hidden, std::int64_t position, Buffer& cache);

 private:
  struct Chunk {
    std::int64_t tokens;
    CallList calls;  // a view without a buffer: of the cache
  };
  class Writer;

  // The call that dequantises a projection's weights.
  const CallRecord& engine(const Projection& part) const;
  void make_buffers();
  Chunk* chunk_for(std::int64_t left, std::int64_t position);

  std::shared_ptr<CompiledDesigns> designs_;
  DecoderShape shape_;
  std::int64_t context_;
  std::map<std::string, std::unique_ptr<Buffer>> buffers_;
  std::vector<Chunk> chunks_;
};

}  // namespace flownpu::npu
