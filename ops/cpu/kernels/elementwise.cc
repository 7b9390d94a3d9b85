// SPDX-License-Identifier: Apache-2.0
// Row-wise kernels between the matrix products: activations, norms, softmax, sums, rotary
// embedding.
#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/cpu/kernels/functions.h"
#include "ops/cpu/kernels/int8_row.h"
#include "ops/cpu/kernels/tables.h"
#include "ops/cpu/kernels/vector.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// y = function(a, b) for each full vector, then once more for a copy of the rest, padded with
// zeros.
template <typename Function>
void map(const float* a, const float* b, float* y, std::int64_t n, const Function& function) {
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(y + i, function(load(a + i), load(b + i)));
  if (i == n) return;
  float rest[3][kLanes] = {};
  std::memcpy(rest[0], a + i, static_cast<std::size_t>(n - i) * sizeof(float));
  std::memcpy(rest[1], b + i, static_cast<std::size_t>(n - i) * sizeof(float));
  store(rest[2], function(load(rest[0]), load(rest[1])));
  std::memcpy(y + i, rest[2], static_cast<std::size_t>(n - i) * sizeof(float));
}

void geglu(const float* gate, const float* up, float* y, std::int64_t n) {
  map(gate, up, y, n, [](Vector g, Vector u) { return gelu_tanh(g) * u; });
}

void swiglu(const float* gate, const float* up, float* y, std::int64_t n) {
  map(gate, up, y, n, [](Vector g, Vector u) { return g / (1.0F + exp(-g)) * u; });
}

void scaled_swiglu(const float* gate, const float* up, const SwigluScale& scale, float* y,
                   std::int64_t n) {
  const Vector most = broadcast(scale.limit);
  // NaN stays NaN: a comparison with it is false.
  map(gate, up, y, n, [&](Vector g, Vector u) {
    g = select(g > most, most, g);
    u = select(u > most, most, select(u < -most, -most, u));
    return g / (1.0F + exp(-scale.alpha * g)) * (u + scale.beta);
  });
}

void add(const float* x, const float* skip, float* sum, std::int64_t n) {
  map(x, skip, sum, n, [](Vector a, Vector b) { return a + b; });
}

void add_scaled(const float* x, float factor, float* sum, std::int64_t n) {
  map(x, sum, sum, n, [factor](Vector a, Vector b) { return b + factor * a; });
}

void convolve_token(const ConvolvedToken& call) {
  for (std::int64_t c = 0; c < call.channels; c += kLanes) {
    const std::int64_t n = std::min<std::int64_t>(kLanes, call.channels - c);
    const auto part = [n](const float* x) { return n == kLanes ? load(x) : load_some(x, n); };
    Vector sum = call.bias == nullptr ? Vector{} : part(call.bias + c);
    for (std::int64_t tap = 0; tap < call.taps; ++tap)
      sum += part(call.weight + tap * call.weight_stride + c) * part(call.x[tap] + c);
    if (call.is_silu) sum /= 1.0F + exp(-sum);
    store_some(call.y + c, sum, n);
  }
}

void quantize(const float* x, std::int64_t n, float scale, int zero, bool is_signed, void* y) {
  const int lowest = is_signed ? -128 : 0;
  const Vector least = broadcast(static_cast<float>(lowest - zero));
  const Vector most = broadcast(static_cast<float>(lowest + 255 - zero));
  // Numbers of this size have no fraction: adding it rounds, to even.
  const Vector whole = broadcast(1.5F * (1 << 23));
  const auto codes = [&](Vector v) {
    v /= scale;
    v = v < least ? least : v;
    v = v > most ? most : v;
    // NaN becomes the least integer, to which a negative zero point is added without overflow.
    const auto bits =
        reinterpret_cast<Bits>(__builtin_convertvector((v + whole) - whole, Integers));
    return reinterpret_cast<Integers>(bits + static_cast<std::uint32_t>(zero));
  };
  auto* to = static_cast<std::int8_t*>(y);
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store_bytes(to + i, codes(load(x + i)));
  if (i == n) return;
  std::int8_t padded[kLanes];
  store_bytes(padded, codes(load_some(x + i, n - i)));
  std::memcpy(to + i, padded, static_cast<std::size_t>(n - i));
}

void dequantize(const void* x, std::int64_t n, float scale, int zero, bool is_signed, float* y) {
  const auto* from = static_cast<const std::int8_t*>(x);
  const int kept = is_signed ? -1 : 0xff;
  const auto numbers = [&](const std::int8_t* codes) {
    const Integers integer = (load_bytes(codes) & kept) - zero;
    return __builtin_convertvector(integer, Vector) * scale;
  };
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(y + i, numbers(from + i));
  if (i == n) return;
  std::int8_t padded[kLanes] = {};
  std::memcpy(padded, from + i, static_cast<std::size_t>(n - i));
  store_some(y + i, numbers(padded), n - i);
}

// The sum of term(vector) for each full vector and term(float) for each element after them.
template <typename Term>
float sum_of_block(const float* x, std::int64_t n, const Term& term) {
  Vector sums{};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) sums += term(load(x + i));
  float sum = reduce_add(sums);
  for (; i < n; ++i) sum += term(x[i]);
  return sum;
}

// Elements that are added up in float, before sums are added in double.
constexpr std::int64_t kSumBlock = 4096;

// The same for any n: sums of blocks are added up in double. A term goes through no more than
// kSumBlock / kLanes additions in its lane, and kLanes more across lanes and at the end: with the
// rounding to float, the sum is off by at most (kSumBlock / kLanes + kLanes) 2^-24 of the sum of
// the terms' magnitudes, 6.2e-5 with 4 lanes and 1.7e-5 with 16.
template <typename Term>
float sum_of(const float* x, std::int64_t n, const Term& term) {
  if (n <= kSumBlock) return sum_of_block(x, n, term);
  double sum = 0;
  for (std::int64_t i = 0; i < n; i += kSumBlock)
    sum += sum_of_block(x + i, std::min(kSumBlock, n - i), term);
  return static_cast<float>(sum);
}

void rms_norm(const float* x, const float* weight, float epsilon, float* y, std::int64_t n) {
  const float squares = sum_of(x, n, [](auto v) { return v * v; });
  const float scale = 1.0F / std::sqrt(squares / static_cast<float>(n) + epsilon);
  std::int64_t i = 0;
  if (weight == nullptr) {
    for (; i < n; ++i) y[i] = x[i] * scale;
    return;
  }
  for (; i + kLanes <= n; i += kLanes) store(y + i, load(x + i) * scale * load(weight + i));
  for (; i < n; ++i) y[i] = x[i] * scale * weight[i];
}

template <Function FUNCTION>
void apply(const float* x, float* y, std::int64_t n) {
  map(x, x, y, n, [](Vector v, Vector /*same*/) { return apply<FUNCTION>(v); });
}

void apply(Function function, const float* x, float* y, std::int64_t n) {
  switch (function) {
    case Function::kNone:
      return apply<Function::kNone>(x, y, n);
    case Function::kAbs:
      return apply<Function::kAbs>(x, y, n);
    case Function::kCos:
      return apply<Function::kCos>(x, y, n);
    case Function::kErf:
      return apply<Function::kErf>(x, y, n);
    case Function::kExp:
      return apply<Function::kExp>(x, y, n);
    case Function::kGelu:
      return apply<Function::kGelu>(x, y, n);
    case Function::kGeluTanh:
      return apply<Function::kGeluTanh>(x, y, n);
    case Function::kLog:
      return apply<Function::kLog>(x, y, n);
    case Function::kNeg:
      return apply<Function::kNeg>(x, y, n);
    case Function::kReciprocal:
      return apply<Function::kReciprocal>(x, y, n);
    case Function::kRelu:
      return apply<Function::kRelu>(x, y, n);
    case Function::kSigmoid:
      return apply<Function::kSigmoid>(x, y, n);
    case Function::kSin:
      return apply<Function::kSin>(x, y, n);
    case Function::kSqrt:
      return apply<Function::kSqrt>(x, y, n);
    case Function::kTanh:
      return apply<Function::kTanh>(x, y, n);
  }
}

// Four running sums of each lane hide an addition's latency of 4 cycles.
double sum(const float* x, std::int64_t n) {
  TwoDoubles sums[2] = {};
  std::int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    for (int part = 0; part < 2; ++part) {
      const TwoDoubles v = to_doubles(load(x + i + part * kLanes));
      sums[part].first += v.first;
      sums[part].second += v.second;
    }
  }
  const Doubles lanes = (sums[0].first + sums[0].second) + (sums[1].first + sums[1].second);
  double total = 0;
  for (int lane = 0; lane < kLanes / 2; ++lane) total += lanes[lane];
  for (; i < n; ++i) total += static_cast<double>(x[i]);
  return total;
}

void add_to_totals(const float* x, double* totals, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) totals[i] += static_cast<double>(x[i]);
}

// The largest, or with the sign -1 the smallest. A lane that is NaN stays NaN: nothing is larger.
template <bool IS_LARGEST>
float extreme(const float* x, std::int64_t n) {
  const auto larger = [](Vector so_far, Vector v) {
    return select((v > so_far) | (v != v), v, so_far);
  };
  constexpr float kSign = IS_LARGEST ? 1.0F : -1.0F;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Vector lanes[2] = {broadcast(-kInfinity), broadcast(-kInfinity)};
  std::int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    lanes[0] = larger(lanes[0], kSign * load(x + i));
    lanes[1] = larger(lanes[1], kSign * load(x + i + kLanes));
  }
  const Vector both = larger(lanes[0], lanes[1]);
  float found = -kInfinity;
  const auto take = [&](float v) { found = v > found || std::isnan(v) ? v : found; };
  for (int lane = 0; lane < kLanes; ++lane) take(both[lane]);
  for (; i < n; ++i) take(kSign * x[i]);
  return kSign * found;
}

// The variance is the mean of squared differences. The mean of squares less the squared mean would
// leave no correct digit if the mean is large.
void layer_norm(const float* x, const float* weight, const float* bias, float epsilon, float* y,
                std::int64_t n) {
  const auto count = static_cast<float>(n);
  const float mean = sum_of(x, n, [](auto v) { return v; }) / count;
  const float squares = sum_of(x, n, [mean](auto v) { return (v - mean) * (v - mean); });
  const float scale = 1.0F / std::sqrt(squares / count + epsilon);
  map(x, weight, y, n, [=](Vector v, Vector w) { return (v - mean) * scale * w; });
  if (bias != nullptr) add(y, bias, y, n);
}

void group_norm(const float* x, const float* weight, const float* bias, float epsilon, bool is_silu,
                float* y, std::int64_t channels, std::int64_t pixels) {
  const std::int64_t n = channels * pixels;
  const auto count = static_cast<float>(n);
  const float mean = sum_of(x, n, [](auto v) { return v; }) / count;
  const float squares = sum_of(x, n, [mean](auto v) { return (v - mean) * (v - mean); });
  const float scale = 1.0F / std::sqrt(squares / count + epsilon);
  for (std::int64_t c = 0; c < channels; ++c, x += pixels, y += pixels) {
    const float factor = scale * weight[c];
    const float shift = bias[c];
    const auto norm = [=](Vector v) { return (v - mean) * factor + shift; };
    if (is_silu) {
      map(x, x, y, pixels, [=](Vector v, Vector /*same*/) {
        const Vector normed = norm(v);
        return normed * apply<Function::kSigmoid>(normed);
      });
    } else {
      map(x, x, y, pixels, [=](Vector v, Vector /*same*/) { return norm(v); });
    }
  }
}

// NaN needs no test here: e^x and the sum become NaN. A row of minus infinity alone becomes NaN
// too, because -inf - -inf is NaN.
float largest_of(const float* x, std::int64_t n) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Vector maxima[2] = {broadcast(-kInfinity), broadcast(-kInfinity)};
  std::int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    maxima[0] = max(maxima[0], load(x + i));
    maxima[1] = max(maxima[1], load(x + i + kLanes));
  }
  float largest = reduce_max(max(maxima[0], maxima[1]));
  for (; i < n; ++i) largest = std::max(largest, x[i]);
  return largest;
}

// y = e^(x - largest), of at most kSumBlock elements; returns their sum.
float powers(const float* x, float largest, float* y, std::int64_t n) {
  Vector sums{};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vector power = exp(load(x + i) - largest);
    store(y + i, power);
    sums += power;
  }
  float sum = reduce_add(sums);
  if (i == n) return sum;
  store_some(y + i, exp(load_some(x + i, n - i) - largest), n - i);
  for (; i < n; ++i) sum += y[i];
  return sum;
}

void softmax(const float* x, float* y, std::int64_t n) {
  const float largest = largest_of(x, n);
  double sum = 0;
  for (std::int64_t i = 0; i < n; i += kSumBlock)
    sum += powers(x + i, largest, y + i, std::min(kSumBlock, n - i));
  const float inverse = 1.0F / static_cast<float>(sum);
  map(y, y, y, n, [inverse](Vector v, Vector /*same*/) { return v * inverse; });
}

void rope(float* x, const float* cos, const float* sin, std::int64_t half, bool interleaved) {
  const std::int64_t step = interleaved ? 2 : 1;
  float* other = interleaved ? x + 1 : x + half;
  for (std::int64_t i = 0; i < half; ++i) {
    const float a = x[i * step];
    const float b = other[i * step];
    x[i * step] = a * cos[i] - b * sin[i];
    other[i * step] = b * cos[i] + a * sin[i];
  }
}

// Whole vectors, then element by element.
template <typename Type>
void store_as(const float* x, void* out, std::int64_t n) {
  auto* elements = static_cast<std::uint16_t*>(out);
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Halves halves = Type::round_vector(load(x + i));
    std::memcpy(elements + i, &halves, sizeof(halves));
  }
  for (; i < n; ++i) elements[i] = Type::round(x[i]);
}

void store_cache(const float* x, void* out, DataType type, std::int64_t n) {
  switch (type) {
    case DataType::kBFloat16:
      return store_as<BFloat16>(x, out, n);
    case DataType::kFloat16:
      return store_as<Half>(x, out, n);
    case DataType::kInt8:
      return store_int8_row(x, out, n);
    default:
      std::copy_n(x, n, static_cast<float*>(out));
  }
}

template <typename Type>
void widen_from(const void* x, float* y, std::int64_t n) {
  const auto* elements = static_cast<const std::uint16_t*>(x);
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(y + i, Type::load_vector(elements + i));
  for (; i < n; ++i) y[i] = Type::load_one(elements + i);
}

void widen(const void* x, DataType type, float* y, std::int64_t n) {
  return type == DataType::kFloat16 ? widen_from<Half>(x, y, n) : widen_from<BFloat16>(x, y, n);
}

}  // namespace

void fill_elementwise(Kernels& kernels) {
  kernels.geglu = geglu;
  kernels.swiglu = swiglu;
  kernels.scaled_swiglu = scaled_swiglu;
  kernels.rms_norm = rms_norm;
  kernels.layer_norm = layer_norm;
  kernels.group_norm = group_norm;
  kernels.quantize = quantize;
  kernels.dequantize = dequantize;
  kernels.apply = apply;
  kernels.sum = sum;
  kernels.largest = extreme<true>;
  kernels.smallest = extreme<false>;
  kernels.add_to_totals = add_to_totals;
  kernels.softmax = softmax;
  kernels.add = add;
  kernels.add_scaled = add_scaled;
  kernels.convolve_token = convolve_token;
  kernels.rope = rope;
  kernels.store_cache = store_cache;
  kernels.widen = widen;
}

}  // namespace flownpu::cpu::FLOWNPU_ISA
