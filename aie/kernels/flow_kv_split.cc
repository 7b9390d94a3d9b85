// SPDX-License-Identifier: Apache-2.0
// FlowKV (Gemma3 on NPU, section 3.2.2, eq. 6-11) on a tile that also projects: one query against
// this tile's share of some KV heads' keys, which come in objects as long as a Q4NX block.
//
// Dataflow: an object holds keys and values of `heads` KV heads, 1280 / (heads d) positions of
// each, or 2048 / (heads d) in int8. Rows, a query head each, are lanes: five keys (four) at a time
// give five vectors of scores, and maxima m, F and the sums l are made for all rows at once,
// without reductions; then each row's Y. Rows of int8 are dequantised to bf16 just before they are
// used. m, l and Y stay in the tile until all of its keys are done. Then tiles put their shares
// together, part by part: m first, the larger of the two; then l and Y, which are added when each
// side was multiplied by a power of 2 for the new m. The last tile gives Y / l of all shares.
//
// The token's own keys and values come with its queries: what the cache has at the token's
// position, new or old, is not read.
//
// Layout: block [position][head][key, value][row], a row d bf16, or 5 d / 4 bytes: d codes, their
// scale in f32 and padding (ops/definitions/int8_cache.py); x: the queries [KV heads][rows][d],
// then the token's own keys and values [KV heads][d]; share f32, see "A share" below. Caller:
// aie/designs/decode_layer/split.py.
//
// Arithmetic as in common/attention.h: powers of 2, m rounded up to an integer; products of bf16
// are exact.
#include <type_traits>

#include "aie/kernels/common/attention.h"
#include "aie/kernels/kernels.h"

namespace flownpu {
namespace {

namespace at = attention;

// The rows of the cache. kHalf: elements of an object's keys; its values are as many. kKeys: rows
// taken at once, which divides the positions of an object.
struct Bf16Rows {
  static constexpr std::int32_t kHalf = 1280;
  static constexpr unsigned kKeys = 5;
  static constexpr std::int32_t bytes(std::int32_t d) { return 2 * d; }
};
struct Int8Rows {
  static constexpr std::int32_t kHalf = 2048;
  static constexpr unsigned kKeys = 4;
  static constexpr std::int32_t bytes(std::int32_t d) { return d + d / 4; }
};
constexpr unsigned kMostRows = 32;  // rows at most
constexpr unsigned kPart = 32;

// A share: a vector with the position of the next key; the powers by which both sides are
// multiplied when shares are put together, [others][ours, theirs][32]; then parts of 32 numbers: m
// of all rows, l of all rows, Y [heads][rows][d].
constexpr unsigned kMostOthers = 3;
constexpr unsigned kPowers = at::kPositionWords;
constexpr unsigned kMaxima = kPowers + kMostOthers * 2 * kMostRows;
constexpr unsigned kSums = kMaxima + kMostRows;
constexpr unsigned kOutputs = kSums + kMostRows;
constexpr std::int32_t kFirstOutput = 2;  // the first part that is Y's
static_assert(kPart == kMostRows, "maxima, sums and outputs are parts alike");

// The run-time parameters' words (README.md); only this kernel uses those from `step` on.
struct Parameters {
  std::int32_t position, key_end, window, step, head, own_keys, own_values;
  float scale;

  explicit Parameters(const std::int32_t* rtp) {
    const auto words = aie::load_v<at::kParameters>(rtp);
    position = words.get(1);
    key_end = words.get(3);
    window = words.get(4);
    scale = float_of(words.get(6));
    step = words.get(8);
    head = words.get(11);
    own_keys = words.get(12);
    own_values = words.get(13);
  }

  // Whether the query sees a key.
  bool sees(std::int32_t key) const {
    return key <= position && key < key_end && position - key < window;
  }
};

// The row that a part of Y belongs to.
unsigned row_of(std::int32_t index, std::int32_t d) {
  const std::int32_t first = (index - kFirstOutput) * static_cast<std::int32_t>(kPart);
  unsigned row = 0;
  for (std::int32_t begin = d; begin <= first; begin += d) ++row;
  return row;
}

// value x power, exactly; `power` holds powers of 2.
Float<kPart> times_power(const Float<kPart>& value, const Float<kPart>& power) {
  const Bf16<kPart> exact = Accumulator<kPart>(power).to_vector<bfloat16>();
  return multiply_by_power(Accumulator<kPart>(value), exact).to_vector<float>();
}

// Dequantises a row of int8, exact but for the rounding to bf16: the scale is one. A function of
// its own is once in program memory.
[[gnu::noinline]] const bfloat16* dequantize(const std::uint8_t* row, bfloat16* to,
                                             std::int32_t d) {
  const float scale = aie::load_v<4>(reinterpret_cast<const float*>(row + d)).get(0);
  const auto factor = Accumulator<kPart>(aie::broadcast<float, kPart>(scale)).to_vector<bfloat16>();
  AIE_PREPARE_FOR_PIPELINING
  AIE_LOOP_MIN_ITERATION_COUNT(2)
  for (std::int32_t i = 0; i < d; i += kPart) {
    // Rows begin at multiples of 16 bytes.
    const auto bytes = aie::concat(aie::load_v<16>(row + i), aie::load_v<16>(row + i + 16));
    const Accumulator<kPart> codes(aie::to_float(bytes.cast_to<std::int8_t>()));
    const auto values = aie::mul(codes.to_vector<bfloat16>(), factor);
    aie::store_v(to + i, values.to_vector<bfloat16>());
  }
  return to;
}

// The keys, or the values, of a head that are taken at once. `row`: the head's row at the first of
// their positions; `line`: bytes from one position to the next.
template <typename Rows>
struct Taken {
  const bfloat16* rows[Rows::kKeys];

  Taken(const std::uint8_t* row, std::int32_t line, bfloat16* dequantized, std::int32_t d) {
    for (unsigned j = 0; j < Rows::kKeys; ++j, row += line) {
      if constexpr (std::is_same_v<Rows, Int8Rows>)
        rows[j] = dequantize(row, dequantized + static_cast<std::int32_t>(j) * d, d);
      else
        rows[j] = reinterpret_cast<const bfloat16*>(row);
    }
  }

  // The token's own row is taken from x. `key`: the first of the positions.
  void take_own(const bfloat16* own, std::int32_t position, std::int32_t key) {
    for (unsigned j = 0; j < Rows::kKeys; ++j)
      if (key + static_cast<std::int32_t>(j) == position) rows[j] = own;
  }
};

float dot(const bfloat16* q, const bfloat16* k, std::int32_t d) {
  Accumulator<kPart> sum = aie::zeros<accfloat, kPart>();
  AIE_PREPARE_FOR_PIPELINING
  AIE_LOOP_MIN_ITERATION_COUNT(1)
  for (std::int32_t i = 0; i < d; i += kPart) {
    sum = aie::mac(sum, aie::load_v<kPart>(q + i), aie::load_v<kPart>(k + i));
  }
  return aie::reduce_add(sum.to_vector<float>());
}

// y = correction y + F V for a row; v: the values of the keys.
template <unsigned kKeys>
void add_values(const Bf16<kMostRows> (&f)[kKeys], unsigned row, const bfloat16* const (&v)[kKeys],
                float correction, float* y, std::int32_t d) {
  const bool rescale =
      __builtin_bit_cast(std::int32_t, correction) != __builtin_bit_cast(std::int32_t, 1.0F);
  const Bf16<kPart> power =
      Accumulator<kPart>(aie::broadcast<float, kPart>(correction)).to_vector<bfloat16>();
  AIE_PREPARE_FOR_PIPELINING
  AIE_LOOP_MIN_ITERATION_COUNT(1)
  for (std::int32_t i = 0; i < d; i += kPart) {
    Accumulator<kPart> sum(aie::load_v<kPart>(y + i));
    if (rescale) sum = multiply_by_power(sum, power);
    AIE_LOOP_UNROLL_FULL
    for (unsigned j = 0; j < kKeys; ++j) {
      sum = aie::mac(sum, aie::load_v<kPart>(v[j] + i), f[j].get(row));
    }
    aie::store_v(y + i, sum.to_vector<float>());
  }
}

// Scores of a head's keys for its rows, from first_row on: element `row` of each t[key].
template <unsigned kKeys>
void scores(const bfloat16* const (&keys)[kKeys], const bfloat16* q, std::int32_t first_row,
            std::int32_t rows, std::int32_t d, Float<kMostRows> (&t)[kKeys]) {
  for (std::int32_t row = first_row; row < first_row + rows; ++row)
    for (unsigned j = 0; j < kKeys; ++j) t[j].set(dot(q + row * d, keys[j], d), row);
}

// An object's keys for all rows. `dequantized`: room for kKeys rows.
template <typename Rows>
void attend(const std::uint8_t* __restrict block, const bfloat16* __restrict x,
            const std::int32_t* __restrict rtp, float* __restrict share,
            bfloat16* __restrict dequantized, std::int32_t turn, std::int32_t heads,
            std::int32_t rows, std::int32_t d, std::int32_t cap) {
  constexpr unsigned kKeys = Rows::kKeys;
  event0();
  set_conversion_modes();
  const Parameters parameters(rtp);
  const at::SoftCap cap_of_scores(cap, parameters.scale);
  const std::int32_t key = at::load_position(share);
  const std::int32_t row_bytes = Rows::bytes(d);
  const std::int32_t kv_head = parameters.head + turn * heads;
  const bfloat16* q = x + kv_head * rows * d;
  const auto lowest = aie::broadcast<float, kMostRows>(at::kLowest);
  const auto rounder = aie::broadcast<float, kMostRows>(kRounder);
  for (std::int32_t first = 0; (first + 1) * heads * d <= Rows::kHalf; first += kKeys) {
    const auto taken = [&](std::int32_t head, std::int32_t value, std::int32_t own) {
      const std::uint8_t* row = block + ((first * heads + head) * 2 + value) * row_bytes;
      Taken<Rows> found(row, heads * 2 * row_bytes, dequantized, d);
      found.take_own(x + own + (kv_head + head) * d, parameters.position, key + first);
      return found;
    };
    Float<kMostRows> t[kKeys];
    for (unsigned j = 0; j < kKeys; ++j) t[j] = aie::zeros<float, kMostRows>();
    for (std::int32_t head = 0; head < heads; ++head) {
      const Taken<Rows> keys = taken(head, 0, parameters.own_keys);
      scores(keys.rows, q, head * rows, rows, d, t);
    }
    if (cap_of_scores.given) {
      for (unsigned j = 0; j < kKeys; ++j) t[j] = cap_of_scores.of_products(t[j]);
    }
    const auto factor =
        broadcast_parts<kMostRows>(cap_of_scores.given ? cap_of_scores.outside : parameters.scale);
    for (unsigned j = 0; j < kKeys; ++j)
      t[j] = multiply(split(t[j]), factor).template to_vector<float>();
    bool seen[kKeys];
    auto limited = aie::broadcast<float, kMostRows>(-1e6F);
    for (unsigned j = 0; j < kKeys; ++j) {
      seen[j] = parameters.sees(key + first + static_cast<std::int32_t>(j));
      if (!seen[j]) t[j] = lowest;
      limited = aie::max(limited, t[j]);
    }

    // m: the maximum rounded up, as in common/attention.h.
    const Float<kMostRows> m_left = aie::load_v<kMostRows>(share + kMaxima);
    const auto up = aie::add(aie::add(limited, aie::broadcast<float, kMostRows>(0.5F)), rounder);
    const Float<kMostRows> m = aie::max(m_left, aie::sub(up, rounder));
    aie::store_v(share + kMaxima, m);
    const auto change =
        aie::max(aie::sub(m_left, m), aie::broadcast<float, kMostRows>(kLowestExponent));
    const Float<kMostRows> correction = power_of_integer(aie::add(change, rounder));

    Bf16<kMostRows> f[kKeys];
    const Bf16<kMostRows> exact = Accumulator<kMostRows>(correction).to_vector<bfloat16>();
    auto l = multiply_by_power(Accumulator<kMostRows>(aie::load_v<kMostRows>(share + kSums)), exact)
                 .to_vector<float>();
    for (unsigned j = 0; j < kKeys; ++j) {
      f[j] = seen[j] ? Accumulator<kMostRows>(power_of_two(aie::sub(t[j], m))).to_vector<bfloat16>()
                     : aie::zeros<bfloat16, kMostRows>();
      l = aie::add(l, Accumulator<kMostRows>(f[j]).to_vector<float>());
    }
    aie::store_v(share + kSums, l);

    for (std::int32_t head = 0; head < heads; ++head) {
      const Taken<Rows> values = taken(head, 1, parameters.own_values);
      for (std::int32_t row = head * rows; row < (head + 1) * rows; ++row) {
        add_values(f, row, values.rows, correction.get(row), share + kOutputs + row * d, d);
      }
    }
  }
  at::store_position(share, key + parameters.step);
  event1();
}

}  // namespace
}  // namespace flownpu

extern "C" {

void flow_kv_split_start(const std::int32_t* __restrict rtp, float* __restrict share,
                         std::int32_t rows, std::int32_t d) {
  using namespace flownpu;
  aie::store_v(share + kMaxima, aie::broadcast<float, kMostRows>(at::kLowest));
  aie::store_v(share + kSums, aie::zeros<float, kMostRows>());
  for (std::int32_t i = 0; i < rows * d; i += kPart) {
    aie::store_v(share + kOutputs + i, aie::zeros<float, kPart>());
  }
  at::store_position(share, aie::load_v<at::kParameters>(rtp).get(2));
}

void flow_kv_split(const std::uint8_t* __restrict block, const bfloat16* __restrict x,
                   const std::int32_t* __restrict rtp, float* __restrict share, std::int32_t turn,
                   std::int32_t heads, std::int32_t rows, std::int32_t d, std::int32_t cap) {
  flownpu::attend<flownpu::Bf16Rows>(block, x, rtp, share, nullptr, turn, heads, rows, d, cap);
}

void flow_kv_split_int8(const std::uint8_t* __restrict block, const bfloat16* __restrict x,
                        const std::int32_t* __restrict rtp, float* __restrict share,
                        bfloat16* __restrict dequantized, std::int32_t turn, std::int32_t heads,
                        std::int32_t rows, std::int32_t d, std::int32_t cap) {
  flownpu::attend<flownpu::Int8Rows>(block, x, rtp, share, dequantized, turn, heads, rows, d, cap);
}

void flow_kv_split_meet(const float* __restrict part, float* __restrict share, std::int32_t index,
                        std::int32_t other, std::int32_t d) {
  using namespace flownpu;
  event0();
  set_conversion_modes();
  float* ours = share + kMaxima + index * kPart;
  float* powers = share + kPowers + other * 2 * kMostRows;
  Float<kPart> sides[] = {aie::load_v<kPart>(ours), aie::load_v<kPart>(part)};
  if (index == 0) {
    const Float<kPart> m = aie::max(sides[0], sides[1]);
    aie::store_v(ours, m);
    const auto lowest = aie::broadcast<float, kPart>(kLowestExponent);
    const auto rounder = aie::broadcast<float, kPart>(kRounder);
    for (unsigned side = 0; side < 2; ++side) {
      const Float<kPart> change = aie::max(aie::sub(sides[side], m), lowest);
      aie::store_v(powers + side * kMostRows, power_of_integer(aie::add(change, rounder)));
    }
  } else {
    for (unsigned side = 0; side < 2; ++side) {
      const Float<kPart> of_rows = aie::load_v<kPart>(powers + side * kMostRows);
      const bool of_row = index >= kFirstOutput;
      sides[side] = times_power(
          sides[side],
          of_row ? aie::broadcast<float, kPart>(of_rows.get(row_of(index, d))) : of_rows);
    }
    aie::store_v(ours, aie::add(sides[0], sides[1]));
  }
  event1();
}

void flow_kv_split_give(const float* __restrict share, float* __restrict part, std::int32_t index) {
  using namespace flownpu;
  event0();
  aie::store_v(part, aie::load_v<kPart>(share + kMaxima + index * kPart));
  event1();
}

void flow_kv_split_store(const float* __restrict share, bfloat16* __restrict part,
                         std::int32_t index, std::int32_t d) {
  using namespace flownpu;
  event0();
  set_conversion_modes();
  const float l = aie::load_v<kMostRows>(share + kSums).get(row_of(index, d));
  // l is 0 where the query saw no key, and so is Y.
  const auto limited =
      aie::max(aie::broadcast<float, kPart>(l), aie::broadcast<float, kPart>(0.25F));
  const auto inverse = split(reciprocal(Accumulator<kPart>(limited)));
  const Float<kPart> y = aie::load_v<kPart>(share + kMaxima + index * kPart);
  aie::store_v(part, multiply(split(y), inverse).to_vector<bfloat16>());
  event1();
}

}  // extern "C"
