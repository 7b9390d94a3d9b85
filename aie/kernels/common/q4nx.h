// SPDX-License-Identifier: Apache-2.0
// Q4NX (Gemma3 on NPU, section 3.1.1): the bytes of one block of 32 rows x 256 columns.
//     offset    0: 256 bf16 scales, [k / 32][row]
//     offset  512: 256 bf16 minima, [k / 32][row]
//     offset 1024: codes of rows 0-15, 256 columns x 8 bytes: byte j holds row 2j in its low half
//                  and row 2j + 1 in its high half
//     offset 3072: codes of rows 16-31, likewise
// w[row, k] = minimum + scale * code (eq. 3).
//
// A weight of 8 bits with code c from -128 to 127 is the sum of two such weights, its planes:
//     high: scale 16 s, minimum -128 s, code floor(c / 16) + 8
//     low:  scale s, minimum m, code c mod 16
// All of these numbers are exact. The high plane's block of 256 columns comes first, then the low
// one's.
#pragma once

#include <aie_api/aie.hpp>
#include <cstdint>

namespace flownpu::q4nx {

inline constexpr unsigned kRows = 32;
inline constexpr unsigned kColumns = 256;
// Columns that share a scale and a minimum.
inline constexpr unsigned kGroup = 32;
inline constexpr unsigned kGroups = kColumns / kGroup;
// How many scales a block has, and how many minima.
inline constexpr unsigned kScales = kGroups * kRows;
inline constexpr unsigned kStripRows = 16;
inline constexpr unsigned kStrips = kRows / kStripRows;
inline constexpr unsigned kColumnBytes = kStripRows / 2;
inline constexpr unsigned kStripBytes = kColumns * kColumnBytes;
inline constexpr unsigned kCodeOffset = 2 * kScales * 2;
inline constexpr unsigned kBlockBytes = kCodeOffset + kStrips * kStripBytes;
static_assert(kBlockBytes == 5120, "32 x 256 weights at 5 bits");

// Sub-blocks of 16 rows x 8 columns (section 3.2.1): 128 codes are one 512-bit load.
inline constexpr unsigned kSubColumns = 8;
inline constexpr unsigned kSubBytes = kSubColumns * kColumnBytes;

inline const bfloat16* scales(const std::uint8_t* block) {
  return reinterpret_cast<const bfloat16*>(block);
}
inline const bfloat16* minima(const std::uint8_t* block) { return scales(block) + kScales; }
// Codes of sub-block `sub` of a strip's 32 along k: [8 columns][8 bytes].
inline aie::vector<std::uint8_t, kSubBytes> load_codes(const std::uint8_t* block, unsigned strip,
                                                       unsigned sub) {
  return aie::load_v<kSubBytes>(block + kCodeOffset + strip * kStripBytes + sub * kSubBytes);
}

// The 64 codes of 32 bytes as bf16, exactly.
inline aie::vector<bfloat16, 64> to_bf16(const aie::vector<std::uint8_t, 32>& bytes) {
  const aie::accum<accfloat, 64> codes(aie::to_float(bytes.cast_to<uint4>().unpack()));
  return codes.to_vector<bfloat16>();
}

}  // namespace flownpu::q4nx
