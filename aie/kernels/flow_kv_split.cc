// SPDX-License-Identifier: Apache-2.0
// FlowKV (Gemma3 on NPU, section 3.2.2, eq. 6-11) on a tile that also projects: one query against
// this tile's share of a KV head's keys, which come in objects as long as a Q4NX block.
//
// Dataflow: an object holds `keys` = 1280 / d keys, then as many values; for each row (a head of
// the group) scores, the running maximum, F, the sums l and Y, which stay in the tile until its
// share is through. What leaves is Y / l in parts of 32 and, after all KV heads', each row's m and
// l, from which flow_kv_merge.cc makes the attention of all shares. Layout: block bf16
// [2][keys][d]; x [KV heads][rows][d], the queries; state: 16 words of position, then m and l,
// [2][8 rows][16 equal lanes]; y [rows][d]; shares f32 [KV heads][m, l][8 rows]. Caller:
// aie/designs/decode_layer/split.py.
//
// Arithmetic as in attention.h: powers of 2, m rounded up to an integer, products exact in bf16.
#include "aie/kernels/attention.h"
#include "aie/kernels/kernels.h"

namespace flownpu {
namespace {

namespace at = attention;

constexpr unsigned kHalf = 1280;  // bf16 of half an object: its keys, or its values
constexpr unsigned kMostKeys = 32;
constexpr unsigned kMostRows = 8;
constexpr unsigned kRowLanes = 16;
constexpr unsigned kPart = 32;

// The run-time parameters' words (README.md), of which `step` is this kernel's own.
struct Share {
  std::int32_t position, key_end, window, step;
  float scale;

  explicit Share(const std::int32_t* rtp) {
    const auto words = aie::load_v<at::kParameters>(rtp);
    position = words.get(1);
    key_end = words.get(3);
    window = words.get(4);
    scale = float_of(words.get(6));
    step = words.get(8);
  }
};

float* maximum(float* state, unsigned row) { return at::maxima(state) + row * kRowLanes; }
const float* maximum(const float* state, unsigned row) {
  return state + at::kPositionWords + row * kRowLanes;
}
float* denominator(float* state, unsigned row) { return maximum(state, kMostRows + row); }
const float* denominator(const float* state, unsigned row) {
  return maximum(state, kMostRows + row);
}

// Which of `keys` keys from `key` the query sees.
aie::mask<kMostKeys> visible(std::int32_t key, std::int32_t keys, const Share& share) {
  const std::int32_t last = share.position + 1 < share.key_end ? share.position + 1 : share.key_end;
  const std::int32_t first = share.position < share.window ? 0 : share.position - share.window + 1;
  const auto lanes = [&](std::int32_t until) {
    const std::int32_t count = until - key < 0 ? 0 : until - key > keys ? keys : until - key;
    return (1U << count) - 1;
  };
  return aie::mask<kMostKeys>::from_uint32(lanes(last) & ~lanes(first));
}

Float<kMostKeys> scores(const bfloat16* q, const bfloat16* k, std::int32_t keys, std::int32_t d) {
  Float<kMostKeys> dots = aie::zeros<float, kMostKeys>();
  for (std::int32_t j = 0; j < keys; ++j) {
    Accumulator<kPart> sum = aie::zeros<accfloat, kPart>();
    AIE_PREPARE_FOR_PIPELINING
    AIE_LOOP_MIN_ITERATION_COUNT(1)
    for (std::int32_t i = 0; i < d; i += kPart) {
      sum = aie::mac(sum, aie::load_v<kPart>(q + i), aie::load_v<kPart>(k + j * d + i));
    }
    dots.set(aie::reduce_add(sum.to_vector<float>()), j);
  }
  return dots;
}

// y = correction y + F V, for a row.
void add_values(const Bf16<kMostKeys>& f, const bfloat16* v, const Float<kRowLanes>& correction,
                float* y, std::int32_t keys, std::int32_t d) {
  const bool rescale =
      __builtin_bit_cast(std::int32_t, correction.get(0)) != __builtin_bit_cast(std::int32_t, 1.0F);
  const Bf16<kPart> power =
      Accumulator<kPart>(aie::broadcast<float, kPart>(correction.get(0))).to_vector<bfloat16>();
  for (std::int32_t i = 0; i < d; i += kPart) {
    Accumulator<kPart> sum(aie::load_v<kPart>(y + i));
    if (rescale) sum = multiply_by_power(sum, power);
    AIE_PREPARE_FOR_PIPELINING
    AIE_LOOP_MIN_ITERATION_COUNT(1)
    for (std::int32_t j = 0; j < keys; ++j) {
      sum = aie::mac(sum, aie::load_v<kPart>(v + j * d + i), f.get(j));
    }
    aie::store_v(y + i, sum.to_vector<float>());
  }
}

}  // namespace
}  // namespace flownpu

extern "C" {

void flow_kv_split_start(const std::int32_t* __restrict rtp, float* __restrict state,
                         float* __restrict y, std::int32_t rows, std::int32_t d) {
  using namespace flownpu;
  for (unsigned row = 0; row < kMostRows; ++row) {
    aie::store_v(maximum(state, row), aie::broadcast<float, kRowLanes>(at::kLowest));
    aie::store_v(denominator(state, row), aie::zeros<float, kRowLanes>());
  }
  for (std::int32_t i = 0; i < rows * d; i += kPart) {
    aie::store_v(y + i, aie::zeros<float, kPart>());
  }
  at::store_position(state, aie::load_v<at::kParameters>(rtp).get(2));
}

void flow_kv_split(const std::uint8_t* __restrict block, const bfloat16* __restrict x,
                   const std::int32_t* __restrict rtp, float* __restrict state, float* __restrict y,
                   std::int32_t turn, std::int32_t rows, std::int32_t d) {
  using namespace flownpu;
  event0();
  round_to_nearest();
  const Share share(rtp);
  const std::int32_t key = at::load_position(state);
  std::int32_t keys = 0;
  while ((keys + 1) * d <= static_cast<std::int32_t>(kHalf)) ++keys;
  const auto* k = reinterpret_cast<const bfloat16*>(block);
  const auto mask = visible(key, keys, share);
  const auto lowest = aie::broadcast<float, kMostKeys>(at::kLowest);
  const auto rounder = aie::broadcast<float, kRowLanes>(kRounder);
  for (std::int32_t row = 0; row < rows; ++row) {
    const bfloat16* q = x + (turn * rows + row) * d;
    const Float<kMostKeys> scaled =
        multiply(split(scores(q, k, keys, d)), broadcast_parts<kMostKeys>(share.scale))
            .to_vector<float>();
    const Float<kMostKeys> t = aie::select(lowest, scaled, mask);

    // m: the maximum rounded up, as in attention.h.
    float* m_of_row = maximum(state, row);
    const Float<kRowLanes> m_left = aie::load_v<kRowLanes>(m_of_row);
    const auto limited = aie::max(aie::broadcast<float, kRowLanes>(aie::reduce_max(t)),
                                  aie::broadcast<float, kRowLanes>(-1e6F));
    const auto up = aie::add(aie::add(limited, aie::broadcast<float, kRowLanes>(0.5F)), rounder);
    const Float<kRowLanes> m = aie::max(m_left, aie::sub(up, rounder));
    aie::store_v(m_of_row, m);
    const auto change =
        aie::max(aie::sub(m_left, m), aie::broadcast<float, kRowLanes>(kLowestExponent));
    const Float<kRowLanes> correction = power_of_integer(aie::add(change, rounder));

    const auto power = power_of_two(aie::sub(t, aie::broadcast<float, kMostKeys>(m.get(0))));
    const Bf16<kMostKeys> rounded = Accumulator<kMostKeys>(power).to_vector<bfloat16>();
    const Bf16<kMostKeys> f = aie::select(aie::zeros<bfloat16, kMostKeys>(), rounded, mask);
    const float added = aie::reduce_add(Accumulator<kMostKeys>(f).to_vector<float>());

    float* l_of_row = denominator(state, row);
    const Bf16<kRowLanes> exact = Accumulator<kRowLanes>(correction).to_vector<bfloat16>();
    const auto l =
        multiply_by_power(Accumulator<kRowLanes>(aie::load_v<kRowLanes>(l_of_row)), exact)
            .to_vector<float>();
    aie::store_v(l_of_row, aie::add(l, aie::broadcast<float, kRowLanes>(added)));
    add_values(f, k + kHalf, correction, y + row * d, keys, d);
  }
  at::store_position(state, key + share.step);
  event1();
}

void flow_kv_split_store(const float* __restrict state, const float* __restrict y,
                         bfloat16* __restrict part, std::int32_t index, std::int32_t d) {
  using namespace flownpu;
  event0();
  round_to_nearest();
  unsigned row = 0;
  for (std::int32_t begin = d; begin <= index * static_cast<std::int32_t>(kPart); begin += d) ++row;
  const float l = aie::load_v<kRowLanes>(denominator(state, row)).get(0);
  // A share of which the query saw no key has y = 0, as l.
  const auto limited =
      aie::max(aie::broadcast<float, kPart>(l), aie::broadcast<float, kPart>(0.25F));
  const auto inverse = split(reciprocal(Accumulator<kPart>(limited)));
  const Float<kPart> sums = aie::load_v<kPart>(y + index * kPart);
  aie::store_v(part, multiply(split(sums), inverse).to_vector<bfloat16>());
  event1();
}

void flow_kv_split_share(const float* __restrict state, float* __restrict shares,
                         std::int32_t turn) {
  using namespace flownpu;
  Float<2 * kMostRows> share;
  for (unsigned row = 0; row < kMostRows; ++row) {
    share.set(aie::load_v<kRowLanes>(maximum(state, row)).get(0), row);
    share.set(aie::load_v<kRowLanes>(denominator(state, row)).get(0), kMostRows + row);
  }
  aie::store_v(shares + turn * 2 * kMostRows, share);
}

void flow_kv_split_give(const float* __restrict shares, bfloat16* __restrict part,
                        std::int32_t turn) {
  constexpr unsigned kShare = 2 * flownpu::kMostRows;
  aie::store_v(reinterpret_cast<float*>(part), aie::load_v<kShare>(shares + turn * kShare));
}

}  // extern "C"
