// SPDX-License-Identifier: Apache-2.0
// flownpu_testing.tile_dots and attend_by_tiles: attention by tiles (tile_rows.h), compiled for
// this machine's plain vectors, with a double of AMX that does what Intel publishes of it
// (Architecture Instruction Set Extensions, TDPBF16PS): tiles are then kLanes numbers wide instead
// of 16.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <optional>
#include <vector>

#define FLOWNPU_ISA tile_double
#include "ops/cpu/kernels/amx/tile_rows.h"
#include "ops/cpu/kernels/functions.h"
#include "ops/error.h"
#include "tests/ops/bindings.h"

namespace nb = nanobind;

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

template <typename T, int DIMENSIONS>
using Array = nb::ndarray<T, nb::ndim<DIMENSIONS>, nb::c_contig, nb::device::cpu>;

// A denormal number becomes zero, as input (DAZ) and as output (FTZ).
float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0F, x) : x; }
float multiplied_and_added(float a, float b, float sum) {
  return flushed(std::fma(flushed(a), flushed(b), flushed(sum)));
}
float bf16_of(std::uint32_t pair, int half) {
  return std::bit_cast<float>(half == 0 ? pair << 16 : pair & 0xffff0000U);
}

class EmulatedUnit {
 public:
  EmulatedUnit() {
    for (Register& tile : tiles_) tile = {kTileRows, kLanes * 4, {}};
    for (const Tile tile : {kX0, kX1}) tiles_[tile].row_bytes = kTileBytes;
  }

  template <Tile TILE>
  static void load(const void* from, std::int64_t stride) {
    Register& tile = tiles_[TILE];
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      tile.data[r] = {};
      std::memcpy(tile.data[r].data(), static_cast<const std::byte*>(from) + r * stride,
                  static_cast<std::size_t>(tile.row_bytes));
    }
  }
  template <Tile TILE>
  static void store(void* to, std::int64_t stride) {
    const Register& tile = tiles_[TILE];
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      std::memcpy(static_cast<std::byte*>(to) + r * stride, tile.data[r].data(),
                  static_cast<std::size_t>(tile.row_bytes));
    }
  }
  template <Tile TILE>
  static void clear() {
    tiles_[TILE].data = {};
  }
  template <Tile DOTS, Tile X, Tile WEIGHTS>
  static void dot() {
    Register& dots = tiles_[DOTS];
    const Register& x = tiles_[X];
    const Register& weights = tiles_[WEIGHTS];
    if (dots.rows != x.rows || dots.row_bytes != weights.row_bytes ||
        x.row_bytes / 4 != weights.rows)
      fail("[tile double] expected shapes that TDPBF16PS takes");
    for (std::int64_t m = 0; m < dots.rows; ++m) {
      for (std::int64_t n = 0; n < dots.row_bytes / 4; ++n) {
        float sums[2] = {};
        for (std::int64_t k = 0; k < x.row_bytes / 4; ++k) {
          for (const int half : {0, 1}) {
            sums[half] = multiplied_and_added(bf16_of(x.data[m][k], half),
                                              bf16_of(weights.data[k][n], half), sums[half]);
          }
        }
        const float before = flushed(std::bit_cast<float>(dots.data[m][n]));
        dots.data[m][n] =
            std::bit_cast<std::uint32_t>(flushed(before + flushed(sums[0] + sums[1])));
      }
    }
  }

 private:
  struct Register {
    std::int64_t rows;
    std::int64_t row_bytes;
    std::array<std::array<std::uint32_t, kTilePairs>, kTileRows> data;
  };
  static inline thread_local std::array<Register, 8> tiles_;
};

// An Arithmetic as BFloat16Pairs of avx512.h.
struct PlainPairs {
  using Element = std::uint32_t;
  using Packed = Bits;
  static constexpr int kStep = 2;
  static constexpr int kVectors = 4;
  static bool converts_keys(DataType /*cache_type*/) { return false; }
  static void convert_key(const AttentionSweep& /*sweep*/, std::int64_t /*key*/,
                          std::uint32_t* /*out*/) {}
  static constexpr float kScoreUnit = 1.44269504F;

  static Vector exponential(Vector x) { return exp(x * 0.693147181F); }
  static Bits of(Vector low, Vector high) { return bf16_bits(low) | bf16_bits(high) << 16; }
  static Vector round(const float* x, std::int64_t n) {
    float halves[2][kLanes] = {};
    for (std::int64_t i = 0; i < std::min<std::int64_t>(n, 2 * kLanes); ++i)
      halves[i % 2][i / 2] = x[i] * kScoreUnit;
    return reinterpret_cast<Vector>(of(load(halves[0]), load(halves[1])));
  }
  static Bits ones() { return Bits{} + 0x3f803f80U; }
  static Bits pack(const Vector (&factors)[kStep]) { return of(factors[0], factors[1]); }
  static void dot(Vector& sum, Bits a, Bits b) {
    const auto low = [](Bits x) { return reinterpret_cast<Vector>(x << 16); };
    const auto high = [](Bits x) { return reinterpret_cast<Vector>(x & 0xffff0000U); };
    sum = (sum + low(a) * low(b)) + high(a) * high(b);
  }
  static void order_values(const AttentionSweep& sweep, std::int64_t key, std::int64_t end,
                           std::uint32_t* out) {
    const auto row = [&](std::int64_t index) {
      return reinterpret_cast<const std::uint16_t*>(cache_row(sweep, sweep.value, index));
    };
    const std::uint16_t* second = row(std::min(key + 1, end - 1));
    for (std::int64_t i = 0; i < sweep.head_size; ++i)
      out[i] = row(key)[i] | std::uint32_t{second[i]} << 16;
  }
};

// dots f32 [16][lanes] += x bf16 [16][32] times pairs bf16 [16][lanes][2].
void tile_dots(const Array<float, 2>& dots, const Array<const std::uint16_t, 2>& x,
               const Array<const std::uint16_t, 3>& weights) {
  const EmulatedUnit unit;
  EmulatedUnit::load<kEven0>(dots.data(), kLanes * 4);
  EmulatedUnit::load<kX0>(x.data(), kTileBytes);
  EmulatedUnit::load<kEven>(weights.data(), kLanes * 4);
  EmulatedUnit::dot<kEven0, kX0, kEven>();
  EmulatedUnit::store<kEven0>(dots.data(), kLanes * 4);
}

// Sweeps keys [begin, keys) of a bf16 cache, each row those from first to last, and writes the
// state: maximum and denominator f32 [rows], numerator f32 [rows, head size]. With `table` the
// cache is in blocks of `block_rows` rows.
void attend_by_tiles(const Array<const float, 2>& query, const Array<const std::uint16_t, 2>& key,
                     const Array<const std::uint16_t, 2>& value,
                     const Array<const std::int32_t, 1>& first,
                     const Array<const std::int32_t, 1>& last,
                     const std::optional<Array<const float, 2>>& bias,
                     const std::optional<Array<const std::int32_t, 1>>& table,
                     std::int64_t block_rows, float softcap, std::int64_t chunk_keys,
                     std::int64_t begin, std::int64_t keys, const Array<float, 1>& maximum,
                     const Array<float, 1>& denominator, const Array<float, 2>& numerator) {
  const auto rows = static_cast<std::int64_t>(query.shape(0));
  const auto head_size = static_cast<std::int64_t>(query.shape(1));
  const std::int64_t row_bytes = head_size * 2;
  CacheBlocks blocks;
  if (table) blocks = {table->data(), block_rows, block_rows * row_bytes};
  std::vector<const float*> biases;
  std::vector<float*> numerators;
  for (std::int64_t r = 0; r < rows; ++r) {
    if (bias) biases.push_back(bias->data() + r * static_cast<std::int64_t>(bias->shape(1)));
    numerators.push_back(numerator.data() + r * head_size);
  }
  AttentionSweep sweep;
  sweep.query = query.data();
  sweep.rows = rows;
  sweep.head_size = head_size;
  sweep.key = key.data();
  sweep.value = value.data();
  sweep.row_bytes = row_bytes;
  sweep.blocks = table ? &blocks : nullptr;
  sweep.cache_type = DataType::kBFloat16;
  sweep.keys = keys;
  sweep.begin = begin;
  sweep.first_key = first.data();
  sweep.last_key = last.data();
  sweep.bias = bias ? biases.data() : nullptr;
  sweep.softcap = softcap;
  sweep.chunk_keys = chunk_keys;
  sweep.maximum = maximum.data();
  sweep.denominator = denominator.data();
  sweep.numerator = numerators.data();
  with_vectors<PlainPairs>(rows, [&]<int VECTORS>() {
    using Rows = TileRows<PlainPairs, EmulatedUnit, VECTORS>;
    const auto bytes = static_cast<std::size_t>(Rows(sweep).scratch());
    constexpr std::align_val_t kAlignment{64};
    auto* scratch = static_cast<std::byte*>(::operator new(bytes, kAlignment));
    std::memset(scratch, 0xff, bytes);  // NaN where nothing is written
    sweep.scratch = scratch;
    Rows(sweep).run();
    ::operator delete(scratch, kAlignment);
  });
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA

void bind_tile_rows(nb::module_& module) {
  namespace unit = flownpu::cpu::tile_double;
  module.attr("tile_lanes") = unit::kLanes;
  module.def("tile_dots", unit::tile_dots);
  module.def("attend_by_tiles", unit::attend_by_tiles, nb::arg(), nb::arg(), nb::arg(), nb::arg(),
             nb::arg(), nb::arg("bias").none(), nb::arg("table").none(), nb::arg("block_rows"),
             nb::arg("softcap"), nb::arg("chunk_keys"), nb::arg("begin"), nb::arg("keys"),
             nb::arg("maximum"), nb::arg("denominator"), nb::arg("numerator"));
}
