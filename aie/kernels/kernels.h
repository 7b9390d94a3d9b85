// SPDX-License-Identifier: Apache-2.0
// The entries of all kernels. README.md beside it describes each kernel's result and layouts; every
// size is in elements. A pointer to const is an input. Any other pointer is written, and also read
// if README.md says "in out".
#pragma once

#include <aie_api/aie.hpp>
#include <cstdint>

extern "C" {

void q4nx_dequant_bf16(const std::uint8_t* block, bfloat16* tile);
void q4nx_dequant_planes_bf16(const std::uint8_t* blocks, bfloat16* tile);

void gemm_bf16(const bfloat16* a, const bfloat16* b, float* c, std::int32_t m, std::int32_t k,
               std::int32_t n);

void zero_f32(float* c, std::int32_t n);
void add_f32(const float* more, float* c, std::int32_t n);
void store_bf16(const float* c, bfloat16* y, std::int32_t n);
void store_gelu(const float* c, bfloat16* y, std::int32_t n);
void store_gelu_mul(const float* gate, const float* up, bfloat16* y, std::int32_t n);
void store_silu_mul(const float* gate, const float* up, bfloat16* y, std::int32_t n);

void fused_dqp_group_sums(const bfloat16* x, bfloat16* sums, std::int32_t k);
void fused_dqp_take(const bfloat16* part, bfloat16* x, bfloat16* sums, std::int32_t j);
void fused_dqp(const std::uint8_t* block, const bfloat16* x, const bfloat16* sums, float* y,
               std::int32_t j, std::int32_t planes);

void flow_qkv_start(const std::int32_t* rtp, float* state, float* y, std::int32_t rows,
                    std::int32_t d);
void flow_qkv_scores(const bfloat16* q, const bfloat16* k, const std::int32_t* rtp, float* state,
                     float* correction, bfloat16* f, float* scores, std::int32_t rows,
                     std::int32_t keys, std::int32_t d, std::int32_t cap);
void flow_qkv_values(const bfloat16* f, const bfloat16* v, const float* correction, float* y,
                     std::int32_t rows, std::int32_t keys, std::int32_t d);
void flow_qkv_finish(const float* state, const float* y, bfloat16* o, std::int32_t part,
                     std::int32_t columns, std::int32_t rows, std::int32_t d);

void flow_kv_start(const bfloat16* q, const std::int32_t* rtp, bfloat16* q_tile, float* state,
                   std::int32_t heads, std::int32_t rows, std::int32_t d);
void flow_kv_scores(const bfloat16* q_tile, const bfloat16* k, const std::int32_t* rtp,
                    float* state, bfloat16* handoff, float* scores, std::int32_t rows,
                    std::int32_t keys, std::int32_t d, std::int32_t cap);
void flow_kv_start_values(float* y, std::int32_t rows, std::int32_t d);
void flow_kv_values(const bfloat16* handoff, const bfloat16* v, float* y, std::int32_t rows,
                    std::int32_t keys, std::int32_t d);
void flow_kv_finish(const float* y, bfloat16* o, std::int32_t heads, std::int32_t rows,
                    std::int32_t d);

void flow_kv_split_start(const std::int32_t* rtp, float* share, std::int32_t rows, std::int32_t d);
void flow_kv_split(const std::uint8_t* block, const bfloat16* x, const std::int32_t* rtp,
                   float* share, std::int32_t turn, std::int32_t heads, std::int32_t rows,
                   std::int32_t d, std::int32_t cap);
void flow_kv_split_int8(const std::uint8_t* block, const bfloat16* x, const std::int32_t* rtp,
                        float* share, bfloat16* dequantized, std::int32_t turn, std::int32_t heads,
                        std::int32_t rows, std::int32_t d, std::int32_t cap);
void flow_kv_split_meet(const float* part, float* share, std::int32_t index, std::int32_t other,
                        std::int32_t d);
void flow_kv_split_give(const float* share, float* part, std::int32_t index);
void flow_kv_split_store(const float* share, bfloat16* part, std::int32_t index, std::int32_t d);

void attention_sinks(const bfloat16* x, float* state, std::int32_t element, std::int32_t step,
                     std::int32_t maxima, std::int32_t sums, std::int32_t heads,
                     std::int32_t queries);

void rms_norm(const bfloat16* x, const bfloat16* weight, bfloat16* y, std::int32_t rows,
              std::int32_t n, std::int32_t epsilon);
void rms_norm_add(const bfloat16* x, const bfloat16* weight, const bfloat16* residual, bfloat16* y,
                  std::int32_t rows, std::int32_t n, std::int32_t epsilon);
void add_rms_norm(const bfloat16* x, const bfloat16* residual, const bfloat16* weight,
                  bfloat16* sum, bfloat16* y, std::int32_t rows, std::int32_t n,
                  std::int32_t epsilon);

void rope(const bfloat16* x, const bfloat16* table, bfloat16* y, std::int32_t heads,
          std::int32_t d);

void square_sums(const bfloat16* x, float* sums, std::int32_t n, std::int32_t batch);
void all_norm_rope(const bfloat16* x, const bfloat16* weights, const bfloat16* table,
                   const float* sums, bfloat16* y, std::int32_t heads, std::int32_t d,
                   std::int32_t first, std::int32_t n, std::int32_t epsilon);
void rms_norm_rope(const bfloat16* x, const bfloat16* weight, const bfloat16* table, bfloat16* y,
                   std::int32_t heads, std::int32_t d, std::int32_t epsilon);
void copy_part(const bfloat16* whole, bfloat16* part, std::int32_t index, std::int32_t n);
void copy_heads(const bfloat16* whole, bfloat16* part, std::int32_t index, std::int32_t n);
void copy_into(const bfloat16* from, bfloat16* to, std::int32_t from_index, std::int32_t to_index,
               std::int32_t n);
void copy_norms(const bfloat16* from, bfloat16* to, std::int32_t from_index, std::int32_t to_index,
                std::int32_t n);

void gated_part(const bfloat16* x, const bfloat16* gate, bfloat16* part, std::int32_t index,
                std::int32_t n);

void gated_delta(const bfloat16* x, bfloat16* state, bfloat16* y, std::int32_t dk, std::int32_t dv);

void int8_rows(const bfloat16* x, std::uint8_t* rows, std::int32_t heads, std::int32_t d);

void patch_pooling(const bfloat16* x, float* sum, std::int32_t patches, std::int32_t n);
void patch_pooling_norm(const float* sum, const bfloat16* weight, bfloat16* y, std::int32_t n,
                        std::int32_t patches, std::int32_t epsilon);

#if __AIE_ARCH__ >= 21
void q4nx_dequant_bfp16(const std::uint8_t* block, bfp16ebs8* tile);
void q4nx_dequant_planes_bfp16(const std::uint8_t* blocks, bfp16ebs8* tile);
void gemm_bfp16(const bfloat16* a, const bfp16ebs8* b, float* c, std::int32_t m, std::int32_t k,
                std::int32_t n);
#endif

}  // extern "C"
