// SPDX-License-Identifier: Apache-2.0
// The Arithmetic of flow_qkv_attention.h in f32, whatever the cache's type.
#pragma once

#include <cstring>
#include <type_traits>

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/attention/cache_row.h"
#include "ops/cpu/kernels/functions.h"
#include "ops/cpu/kernels/int8_row.h"
#include "ops/cpu/kernels/vector.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// Vectors of query rows in a block, and accumulators in a tile. Registers also hold a block's
// vectors and a broadcast element.
//   AVX-512, NEON: 32 registers, 4 x 4 accumulators, 4 of queries.
//   AVX2: 16 registers, 2 x 6 accumulators, 2 of queries, 1 element.
//   others: 16 registers, 2 x 4 accumulators: without FMA a product needs a register of its own.
constexpr int kFloatVectors = kRegisters == 32 ? 4 : 2;
constexpr int kFloatAccumulators = kRegisters == 32 ? 16 : kLanes == 8 ? 12 : 8;

struct FloatProducts {
  using Element = float;
  using Packed = Vector;
  // How many elements of a head, or keys, one multiplication takes.
  static constexpr int kStep = 1;
  static constexpr int kVectors = kFloatVectors;
  static constexpr int tile(int vectors) { return kFloatAccumulators / vectors; }
  static bool converts_keys(DataType cache_type) { return cache_type != DataType::kFloat32; }
  // Scores are natural logarithms.
  static constexpr float kScoreUnit = 1.0F;

  static Vector exponential(Vector x) { return exp(x); }

  static Vector round(const float* x, std::int64_t n) {
    if (n >= kLanes) return load(x);
    float padded[kLanes] = {};
    std::memcpy(padded, x, static_cast<std::size_t>(n) * sizeof(float));
    return load(padded);
  }

  static Vector load_packed(const float* x) { return load(x); }
  static Vector broadcast_element(const void* x) {
    float element;
    std::memcpy(&element, x, sizeof(element));
    return broadcast(element);
  }
  static Vector ones() { return broadcast(1.0F); }
  static void dot(Vector& sum, Vector a, Vector b) { sum += a * b; }
  static Vector pack(const Vector (&factors)[kStep]) { return factors[0]; }

  // Type: the cache's element type (vector.h).
  template <typename Type>
  static void convert(const std::byte* row, std::int64_t d, float* out) {
    const auto* from = reinterpret_cast<const typename Type::Element*>(row);
    // Multiplication by 1 changes nothing, not even a NaN or an infinity.
    const float scale = std::is_same_v<Type, Int8> ? int8_row_scale(row, d) : 1.0F;
    std::int64_t i = 0;
    for (; i + kLanes <= d; i += kLanes) store(out + i, Type::load_vector(from + i) * scale);
    for (; i < d; ++i) out[i] = Type::load_one(from + i) * scale;
  }
  static void convert(const AttentionSweep& sweep, const std::byte* row, float* out) {
    switch (sweep.cache_type) {
      case DataType::kBFloat16:
        return convert<BFloat16>(row, sweep.head_size, out);
      case DataType::kFloat16:
        return convert<Half>(row, sweep.head_size, out);
      case DataType::kInt8:
        return convert<Int8>(row, sweep.head_size, out);
      default:
        return convert<Float>(row, sweep.head_size, out);
    }
  }
  static void convert_key(const AttentionSweep& sweep, std::int64_t key, float* out) {
    convert(sweep, cache_row(sweep, sweep.key, key), out);
  }
  static void order_values(const AttentionSweep& sweep, std::int64_t key, std::int64_t /*end*/,
                           float* out) {
    convert(sweep, cache_row(sweep, sweep.value, key), out);
  }
};

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
