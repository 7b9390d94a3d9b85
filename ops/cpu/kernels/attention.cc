// SPDX-License-Identifier: Apache-2.0
// Attention over a range of the KV cache: which kernel takes which cache.
#include "ops/cpu/kernels/attention_float.h"
#include "ops/cpu/kernels/flow_kv_attention.h"
#include "ops/cpu/kernels/flow_qkv_attention.h"
#include "ops/cpu/kernels/tables.h"
#if defined(__AVX512BF16__)
#include "ops/cpu/kernels/attention_avx512.h"
#endif

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

void attend_few(const AttentionSweep& sweep) {
  switch (sweep.cache_type) {
    case DataType::kBFloat16:
      return FewRows<BFloat16>(sweep).run();
    case DataType::kFloat16:
      return FewRows<Half>(sweep).run();
    default:
      return FewRows<Float>(sweep).run();
  }
}

// A head of odd size does not fall into pairs.
bool takes_pairs([[maybe_unused]] std::int64_t head_size, [[maybe_unused]] DataType cache_type) {
#if defined(__AVX512BF16__)
  return cache_type == DataType::kBFloat16 && head_size % 2 == 0;
#else
  return false;
#endif
}

// Calls function.template operator()<Arithmetic>() with what the cache's type is multiplied as.
template <typename Function>
auto with_arithmetic([[maybe_unused]] std::int64_t head_size, DataType cache_type,
                     const Function& function) {
#if defined(__AVX512BF16__)
  if (takes_pairs(head_size, cache_type)) return function.template operator()<BFloat16Pairs>();
#endif
  switch (cache_type) {
    case DataType::kBFloat16:
      return function.template operator()<FloatProducts<BFloat16>>();
    case DataType::kFloat16:
      return function.template operator()<FloatProducts<Half>>();
    default:
      return function.template operator()<FloatProducts<Float>>();
  }
}

void attend_many(const AttentionSweep& sweep) {
  with_arithmetic(sweep.head_size, sweep.cache_type, [&]<typename Arithmetic>() {
    with_vectors<Arithmetic>(sweep.rows,
                             [&]<int VECTORS>() { ManyRows<Arithmetic, VECTORS>(sweep).run(); });
  });
}

std::int64_t attention_scratch(std::int64_t rows, std::int64_t head_size, DataType cache_type,
                               std::int64_t chunk_keys) {
  AttentionSweep sweep;
  sweep.rows = rows;
  sweep.head_size = head_size;
  sweep.chunk_keys = chunk_keys;
  return with_arithmetic(head_size, cache_type, [&]<typename Arithmetic>() {
    return with_vectors<Arithmetic>(
        rows, [&]<int VECTORS>() { return ManyRows<Arithmetic, VECTORS>(sweep).scratch(); });
  });
}

std::int64_t attention_element(std::int64_t head_size, DataType cache_type) {
  return takes_pairs(head_size, cache_type) ? 2 : 4;
}

}  // namespace

void fill_attention(Kernels& kernels) {
  kernels.attend_few = attend_few;
  kernels.attend_many = attend_many;
  kernels.attention_scratch = attention_scratch;
  kernels.attention_element = attention_element;
  kernels.few_rows = kFewRows;
  kernels.block_rows = kFloatVectors * kLanes;
}

}  // namespace flownpu::cpu::FLOWNPU_ISA
