// SPDX-License-Identifier: Apache-2.0
#include "ops/system/processor_features.h"

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>

#include "ops/system/processors.h"
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace flownpu {
namespace {

#if defined(__x86_64__)

// The result of CPUID; zeros if the processor does not know the leaf.
struct Answer {
  Answer(unsigned leaf, unsigned part) { __get_cpuid_count(leaf, part, &eax, &ebx, &ecx, &edx); }

  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
};

// Whether all these bits are set.
template <typename... Bits>
bool has(unsigned answer, Bits... bits) {
  return (((answer >> bits & 1) != 0) && ...);
}

// Bits of XCR0: the registers that the system saves when it switches threads.
constexpr std::uint32_t kYmm = 0b110;
constexpr std::uint32_t kZmm = kYmm | 0b11100000;
constexpr std::uint32_t kTiles = 0b11 << 17;

bool is_saved(std::uint32_t state) {
  constexpr int kXgetbv = 27;
  if (!has(Answer(1, 0).ecx, kXgetbv)) return false;
  std::uint32_t low = 0;
  std::uint32_t high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & state) == state;
}

bool is_intel() noexcept {
  const Answer name(0, 0);
  return name.ebx == signature_INTEL_ebx && name.edx == signature_INTEL_edx &&
         name.ecx == signature_INTEL_ecx;
}

// Family and model, as the version in EAX of leaf 1 gives them: from family 15 on the family is the
// sum of two fields, and in families 6 and 15 the model has two.
struct Version {
  unsigned family;
  unsigned model;

  constexpr explicit Version(unsigned eax)
      : family((eax >> 8 & 0xf) + (eax >> 20 & 0xff)),
        model((eax >> 4 & 0xf) + (eax >> 12 & 0xf0)) {}

  constexpr bool is_golden_cove_server() const {
    return family == 6 && (model == 0x8f || model == 0xcf);
  }
};
// The versions of a Sapphire Rapids, an Emerald Rapids, a Granite Rapids and a Zen 4.
static_assert(Version(0x806f8).is_golden_cove_server() && Version(0xc06f2).is_golden_cove_server());
static_assert(!Version(0xa06d1).is_golden_cove_server() && Version(0xa06d1).model == 0xad);
static_assert(Version(0xa60f12).family == 0x19 && !Version(0xa60f12).is_golden_cove_server());

bool is_zen4() noexcept {
  constexpr unsigned kFamily = 0x19;
  const Answer name(0, 0);
  return name.ebx == signature_AMD_ebx && name.edx == signature_AMD_edx &&
         name.ecx == signature_AMD_ecx && Version(Answer(1, 0).eax).family == kFamily;
}

bool is_first_with_tiles() noexcept {
  return is_intel() && Version(Answer(1, 0).eax).is_golden_cove_server();
}

#else

bool is_intel() noexcept { return false; }
bool is_zen4() noexcept { return false; }
bool is_first_with_tiles() noexcept { return false; }

#endif

}  // namespace

bool has_avx2() {
#if defined(__x86_64__)
  constexpr int kFma = 12;
  constexpr int kF16c = 29;
  constexpr int kAvx2 = 5;
  return is_saved(kYmm) && has(Answer(1, 0).ecx, kFma, kF16c) && has(Answer(7, 0).ebx, kAvx2);
#else
  return false;
#endif
}

bool has_avx512() {
#if defined(__x86_64__)
  constexpr int kF = 16;
  constexpr int kDq = 17;
  constexpr int kBw = 30;
  constexpr int kVl = 31;
  constexpr int kVbmi = 1;
  constexpr int kVnni = 11;
  constexpr int kBf16 = 5;
  const Answer features(7, 0);
  return is_saved(kZmm) && has(features.ebx, kF, kDq, kBw, kVl) &&
         has(features.ecx, kVbmi, kVnni) && features.eax >= 1 && has(Answer(7, 1).eax, kBf16);
#else
  return false;
#endif
}

bool has_dot_products() {
#if defined(__aarch64__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  return false;
#endif
}

bool has_int8_matrices() {
#if defined(__aarch64__)
  return has_dot_products() && (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
#else
  return false;
#endif
}

const bool kFetchIntoL2 = is_intel();
const bool kAlternateByPages = is_zen4();
const bool kMultipliesFloatFaster = is_first_with_tiles();
const bool kMovesTilesSlowly = is_first_with_tiles();

bool may_use_tiles() {
#if defined(__x86_64__)
  constexpr int kBf16 = 22;
  constexpr int kTile = 24;
  constexpr int kInt8 = 25;
  return is_saved(kTiles) && has(Answer(7, 0).edx, kBf16, kTile, kInt8) && ask_for_tiles();
#else
  return false;
#endif
}

}  // namespace flownpu
