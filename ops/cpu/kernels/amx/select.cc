// SPDX-License-Identifier: Apache-2.0
// The table of processors with AMX: that of AVX-512, with products of int8 and attention of prompts
// by tiles.
#include "ops/cpu/kernels/amx/attention.h"
#include "ops/cpu/kernels/amx/panels.h"
#include "ops/cpu/kernels/amx/parts.h"
#include "ops/cpu/kernels/tables.h"
#include "ops/system/processor_features.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// Tiles take as long for fewer rows as for 16; vectors take less time.
constexpr std::int64_t kFewestTileRows = 16;

// Half of each tile of panels is zeros. On a Granite Rapids 16 rows take 0.87 of the vectors' time
// so (docs/results.md); on an Emerald Rapids 16 and 24 rows take 1.25 and 1.36 of it, and 32 as
// long.
std::int64_t fewest_panel_rows() { return kMovesTilesSlowly ? 2 * kTileRows : kTileRows; }

void multiply(const Q4NXRows& weight, std::int64_t row_blocks, const RoundedActivations& a,
              std::int64_t first, std::int64_t count, std::byte* scratch, float* out) {
  switch (a.order) {
    case Int8Order::kPanels:
      if (count < fewest_panel_rows()) break;
      return with_four_bit_layout(weight.layout, [&]<q4nx::Layout LAYOUT>() {
        multiply_panels_tiles<LAYOUT>(weight, row_blocks, a, first, count, out);
      });
    case Int8Order::kParts:
      return multiply_bytes_tiles(weight, row_blocks, a, first, count, scratch, out);
    case Int8Order::kGroups:
      break;
  }
  avx512::kernels().matmul_int8(weight, row_blocks, a, first, count, scratch, out);
}

void multiply_dense(const std::byte* packed, DenseType type, const RoundedActivations& a,
                    std::int64_t first, std::int64_t count, std::int64_t columns, float* out) {
  if (type == DenseType::kInt8 && count >= kFewestTileRows)
    return multiply_dense_tiles(packed, a, first, count, out);
  avx512::kernels().matmul_dense(packed, type, a, first, count, columns, out);
}

}  // namespace

const Kernels& kernels() {
  static const Kernels table = [] {
    Kernels filled = avx512::kernels();
    filled.isa = "amx";
    filled.matmul_int8 = multiply;
    filled.matmul_dense = multiply_dense;
    filled.fewest_tile_rows = fewest_panel_rows();
    filled.attend_many = attend_many;
    filled.attention_scratch = attention_scratch;
    return filled;
  }();
  return table;
}

}  // namespace flownpu::cpu::FLOWNPU_ISA
