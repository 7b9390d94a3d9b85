// SPDX-License-Identifier: Apache-2.0
#include "ops/lowering/weights/quantize_group.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/formats/numbers.h"
#include "ops/system/processor_features.h"

namespace flownpu::lowering {
namespace {

constexpr float kLargestCode = q4nx::kLargestCode;
// The starting points of the search: inward shifts of the smallest and the largest weight, in units
// of range / 15. All pairs are tried and refitted once. The best pair is refitted three more times.
// On normal and on Student-t (4 degrees of freedom) weights that comes within 2.2 % of the squared
// error of 12 x 12 starts with 3 refits each, in a tenth of the time.
constexpr std::array<float, 4> kStarts{-0.3F, 0.15F, 0.6F, 1.2F};
constexpr int kFinalRefits = 3;

// A float this large has no fraction bits: adding it to a number and subtracting it again rounds
// the number to the nearest integer, ties to even, without a function call.
constexpr float kToInteger = 0x1p23F;

// GCC and Clang warn that vectors are passed to functions differently without AVX-512. The warning
// does not matter here, because all functions that take or return vectors are inlined.
#pragma GCC diagnostic ignored "-Wpsabi"

// Searches `kWidth` groups side by side, which fill a vector register: 4 with SSE2, 8 with AVX2, 16
// with AVX-512. Every group goes through the same operations as it would alone, so that all widths
// find the same bits.
template <std::size_t kWidth>
class Search {
 public:
  typedef float Lanes __attribute__((vector_size(kWidth * sizeof(float))));
  typedef std::uint32_t Bits __attribute__((vector_size(kWidth * sizeof(float))));
  // Not a std::array: as a template argument the vector type would lose its attribute.
  struct Codes {
    Lanes of[q4nx::kGroup];  // NOLINT(modernize-avoid-c-arrays)

    Lanes& operator[](std::size_t i) { return of[i]; }
    const Lanes& operator[](std::size_t i) const { return of[i]; }
  };
  struct Parameters {
    Lanes scale{};
    Lanes minimum{};
  };

  // `weights`: the first `size` elements are used, one vector of all groups each.
  [[gnu::always_inline]] Search(const Codes& weights, std::size_t size)
      : weights_(weights), size_(size), count_(static_cast<float>(size)) {
    for (std::size_t i = 0; i < size_; ++i) total_ += weights_[i];
  }

  [[gnu::always_inline]] Parameters run() {
    Lanes smallest = weights_[0];
    Lanes largest = weights_[0];
    for (std::size_t i = 1; i < size_; ++i) {
      smallest = weights_[i] < smallest ? weights_[i] : smallest;
      largest = weights_[i] > largest ? weights_[i] : largest;
    }
    const Lanes step = largest / kLargestCode - smallest / kLargestCode;
    // The first candidate is the mean alone, with scale 0: right for a constant group, and with an
    // error that the other candidates must beat.
    consider({Lanes{}, rounded(total_ / count_)});
    for (const float low : kStarts) {
      for (const float high : kStarts) {
        const Lanes inner = step * ((kLargestCode - low - high) / kLargestCode);
        consider(refit(consider({rounded(inner), rounded(smallest + low * step)})));
      }
    }
    for (int i = 0; i < kFinalRefits; ++i) consider(refit(codes(best_)));
    return best_;
  }

  // The codes for which scale * code + minimum is nearest to the weights.
  [[gnu::always_inline]] Codes codes(const Parameters& parameters) const {
    const Lanes inverse =
        parameters.scale >= std::numeric_limits<float>::min() ? 1 / parameters.scale : Lanes{};
    Codes codes;
    for (std::size_t i = 0; i < size_; ++i) {
      const Lanes code = (weights_[i] - parameters.minimum) * inverse;
      const Lanes above = code > 0 ? code : Lanes{};
      const Lanes clamped = above < kLargestCode ? above : Lanes{} + kLargestCode;
      codes[i] = (clamped + kToInteger) - kToInteger;
    }
    return codes;
  }

 private:
  // Rounds to bf16 and back, for finite values as to_bfloat16() does.
  [[gnu::always_inline]] static Lanes rounded(const Lanes& value) {
    const Bits bits = __builtin_bit_cast(Bits, value);
    const Bits nearest = (bits + 0x7fffU + ((bits >> 16) & 1U)) & 0xffff0000U;
    return __builtin_bit_cast(Lanes, nearest);
  }

  // Keeps these parameters for the groups whose error they reduce; returns the codes that they
  // give.
  [[gnu::always_inline]] Codes consider(const Parameters& parameters) {
    const Codes found = codes(parameters);
    Lanes error{};
    for (std::size_t i = 0; i < size_; ++i) {
      const Lanes difference = found[i] * parameters.scale + parameters.minimum - weights_[i];
      error += difference * difference;
    }
    best_.scale = error < least_error_ ? parameters.scale : best_.scale;
    best_.minimum = error < least_error_ ? parameters.minimum : best_.minimum;
    least_error_ = error < least_error_ ? error : least_error_;
    return found;
  }

  // The scale and minimum that fit these codes best by least squares; the minimum is fitted to the
  // rounded scale.
  [[gnu::always_inline]] Parameters refit(const Codes& codes) const {
    Lanes sum{};
    Lanes squares{};
    Lanes products{};
    for (std::size_t i = 0; i < size_; ++i) {
      sum += codes[i];
      squares += codes[i] * codes[i];
      products += weights_[i] * codes[i];
    }
    const Lanes determinant = count_ * squares - sum * sum;
    const Lanes slope =
        determinant > 0 ? (count_ * products - sum * total_) / determinant : Lanes{};
    const Lanes scale = rounded(slope > 0 ? slope : Lanes{});
    return {scale, rounded((total_ - scale * sum) / count_)};
  }

  const Codes& weights_;
  std::size_t size_;
  float count_;
  Lanes total_{};
  Parameters best_;
  Lanes least_error_ = Lanes{} + std::numeric_limits<float>::infinity();
};

// The exponent of the power of two that a group must be divided by for its largest magnitude to be
// in 1/2 to 1.
int exponent_of(std::span<const float> weights) {
  float largest = 0;
  for (const float weight : weights) largest = std::max(largest, std::abs(weight));
  return largest > 0 ? std::max(std::ilogb(largest) + 1, -126) : 0;
}

// Quantises at most kWidth groups.
template <std::size_t kWidth>
[[gnu::always_inline]] inline void quantize_some(std::span<const float> weights, std::size_t size,
                                                 std::span<Q4NXGroup> found) {
  // Groups are scaled to magnitudes of 1/2 to 1, where no square overflows or underflows; scaling
  // by a power of two changes no rounding.
  std::array<int, kWidth> exponents{};
  typename Search<kWidth>::Codes scaled{};
  for (std::size_t g = 0; g < found.size(); ++g) {
    const std::span<const float> group = weights.subspan(g * size, size);
    exponents[g] = exponent_of(group);
    const float power = std::ldexp(1.0F, -exponents[g]);
    for (std::size_t i = 0; i < size; ++i) scaled[i][g] = group[i] * power;
  }
  Search<kWidth> search(scaled, size);
  const auto best = search.run();
  const auto codes = search.codes(best);
  for (std::size_t g = 0; g < found.size(); ++g) {
    found[g] = {};
    found[g].scale = to_bfloat16(std::ldexp(best.scale[g], exponents[g]));
    found[g].minimum = to_bfloat16(std::ldexp(best.minimum[g], exponents[g]));
    for (std::size_t i = 0; i < size; ++i)
      found[g].codes[i] = static_cast<std::int8_t>(codes[i][g]);
  }
}

template <std::size_t kWidth>
[[gnu::always_inline]] inline void quantize_all(std::span<const float> weights, std::size_t size,
                                                std::span<Q4NXGroup> found) {
  for (std::size_t first = 0; first < found.size(); first += kWidth) {
    const std::size_t count = std::min(found.size() - first, kWidth);
    quantize_some<kWidth>(weights.subspan(first * size, count * size), size,
                          found.subspan(first, count));
  }
}

#if defined(__x86_64__)
[[gnu::target("avx2")]] void quantize_with_avx2(std::span<const float> weights, std::size_t size,
                                                std::span<Q4NXGroup> found) {
  quantize_all<8>(weights, size, found);
}

[[gnu::target("avx512f")]] void quantize_with_avx512(std::span<const float> weights,
                                                     std::size_t size, std::span<Q4NXGroup> found) {
  quantize_all<16>(weights, size, found);
}
#endif

}  // namespace

float Q4NXGroup::weight(std::size_t i) const {
  return from_bfloat16(scale) * static_cast<float>(codes[i]) + from_bfloat16(minimum);
}

std::vector<std::size_t> search_widths() {
  std::vector<std::size_t> widths{4};
#if defined(__x86_64__)
  if (has_avx2()) widths.push_back(8);
  if (has_avx512()) widths.push_back(16);
#endif
  return widths;
}

void quantize_groups(std::span<const float> weights, std::size_t size, std::span<Q4NXGroup> found,
                     std::size_t width) {
  static const std::size_t widest = search_widths().back();
  if (width == 0) width = found.size() <= 4 ? 4 : widest;  // a few groups fit the narrowest vector
  switch (width) {
#if defined(__x86_64__)
    case 8:
      return quantize_with_avx2(weights, size, found);
    case 16:
      return quantize_with_avx512(weights, size, found);
#endif
    default:
      return quantize_all<4>(weights, size, found);
  }
}

Q4NXGroup quantize_group(std::span<const float> weights) {
  Q4NXGroup group;
  quantize_groups(weights, weights.size(), {&group, 1});
  return group;
}

}  // namespace flownpu::lowering
