// SPDX-License-Identifier: Apache-2.0
// Attention over a range of the KV cache: which kernel takes which cache.
#include "ops/cpu/kernels/attention/alone.h"
#include "ops/cpu/kernels/attention/few_rows_int8.h"
#include "ops/cpu/kernels/attention/float.h"
#include "ops/cpu/kernels/attention/flow_kv_attention.h"
#include "ops/cpu/kernels/attention/flow_qkv_attention.h"
#include "ops/cpu/kernels/tables.h"
#if defined(__AVX512BF16__)
#include "ops/cpu/kernels/attention/avx512.h"
#include "ops/cpu/kernels/attention/few_rows_bf16_avx512.h"
#include "ops/system/processor_features.h"
#endif

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

void sweep_few(const AttentionSweep& sweep) {
  switch (sweep.cache_type) {
    case DataType::kBFloat16:
      return FewRows<BFloat16>(sweep).run();
    case DataType::kFloat16:
      return FewRows<Half>(sweep).run();
    case DataType::kInt8:
      return FewRowsInt8(sweep).run();
    default:
      return FewRows<Float>(sweep).run();
  }
}

// Calls function.template operator()<Arithmetic>() with what a sweep multiplies.
template <typename Function>
auto with_arithmetic([[maybe_unused]] const AttentionSweep& sweep, const Function& function) {
#if defined(__AVX512BF16__)
  if (takes_pairs(sweep.head_size, sweep.cache_type) &&
      (sweep.rows < kPromptRows || !kMultipliesFloatFaster))
    return function.template operator()<BFloat16Pairs>();
#endif
  return function.template operator()<FloatProducts>();
}

void sweep_many(const AttentionSweep& sweep) {
#if defined(__AVX512BF16__)
  if (sweep.cache_type == DataType::kBFloat16 && FewRowsBFloat16::takes(sweep))
    return FewRowsBFloat16(sweep).run();
#endif
  with_arithmetic(sweep, [&]<typename Arithmetic>() {
    with_vectors<Arithmetic>(sweep.rows,
                             [&]<int VECTORS>() { ManyRows<Arithmetic, VECTORS>(sweep).run(); });
  });
}

void attend_few_rows(const AttentionSweep& sweep) {
  sweep_few(sweep);
  attend_alone_where_not_finite(sweep, sweep_few, sweep_many);
}

void attend_many(const AttentionSweep& sweep) {
  sweep_many(sweep);
  attend_alone_where_not_finite(sweep, sweep_few, sweep_many);
}

std::int64_t scratch_of(const AttentionSweep& sweep) {
  return with_arithmetic(sweep, [&]<typename Arithmetic>() {
    return with_vectors<Arithmetic>(
        sweep.rows, [&]<int VECTORS>() { return ManyRows<Arithmetic, VECTORS>(sweep).scratch(); });
  });
}

std::int64_t attention_scratch(std::int64_t rows, std::int64_t head_size, DataType cache_type,
                               std::int64_t chunk_keys) {
  return most_scratch(rows, head_size, cache_type, chunk_keys, scratch_of);
}

std::int64_t attention_element([[maybe_unused]] std::int64_t head_size,
                               [[maybe_unused]] DataType cache_type) {
#if defined(__AVX512BF16__)
  if (takes_pairs(head_size, cache_type)) return 2;
#endif
  return 4;
}

}  // namespace

void fill_attention(Kernels& kernels) {
  kernels.attend_few_rows = attend_few_rows;
  kernels.attend_many = attend_many;
  kernels.attention_scratch = attention_scratch;
  kernels.attention_element = attention_element;
  kernels.few_rows = kFewRows;
  kernels.block_rows = kFloatVectors * kLanes;
}

}  // namespace flownpu::cpu::FLOWNPU_ISA
