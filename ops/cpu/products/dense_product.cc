// SPDX-License-Identifier: Apache-2.0
// A product with a dense weight. Rows of activations are rounded, and multiplied in tiles by packed
// columns: a constant's, packed when the session was made, or a panel at a time.
#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "ops/cpu/products/dense_matmul.h"
#include "ops/cpu/products/q4nx_matmul_plan.h"
#include "ops/formats/q4nx.h"
#include "ops/system/memory.h"

namespace flownpu::cpu {
namespace {

// The most bytes of columns that are packed at once, unless a block for each thread is more. The
// widest weight of an encoder's layer, 4304 x 1152 in int8, is 5 MB; all threads find it in a
// third-level cache.
constexpr std::int64_t kPanelBytes = 8 << 20;
// A result larger than a common third-level cache is written past the caches, because a later
// reader would not find it there.
constexpr std::int64_t kStreamedDenseBytes = 32 << 20;
// Rows of a task are cut in multiples of those that kernels multiply together: 12, or 6. Others
// take as long as a whole tile: 89 rows as long as 96.
constexpr std::int64_t kRowTile = 12;
// The fewest rows of a task. A thread multiplies 32 columns by 48 rows in twice the time in which
// it reads the columns from a third-level cache (at 20 GB/s, and 900 GOP/s in int8).
constexpr std::int64_t kLeastTaskRows = 48;
constexpr std::int64_t kTasksPerThread = 8;
// The fewest multiply-adds of a task: some 10 us in f32, against 1 to 5 us to hand a task to
// another thread.
constexpr std::int64_t kLeastTaskWork = std::int64_t{1} << 18;
// A few rows take as long as their weight's bytes from a third-level cache: 13 us at 20 GB/s for so
// many elements of 4 bytes.
constexpr std::int64_t kLeastFewElements = std::int64_t{1} << 16;

std::int64_t bytes_of_element(DenseType type) {
  return type == DenseType::kFloat ? 4 : type == DenseType::kBFloat16 ? 2 : 1;
}

// In how many tasks to do `items` of `each` multiply-adds, at most.
std::int64_t tasks_of(std::int64_t items, std::int64_t each, std::int64_t least = kLeastTaskWork) {
  return std::clamp<std::int64_t>(items * each / least, 1, items);
}

// If there are enough rows, each task multiplies all columns: its rows stay in half of the L2, and
// the columns pass through. If that is room for too few rows, they pass through as well, and the
// more of them there are, the less often the columns do. (bf16, 1280 columns: 512 rows of 11,520
// at 77 GMAC/s with 48 rows a task, 59 with 24.)
MatMulPlan plan_dense(std::int64_t rows, std::int64_t row_bytes, std::int64_t block_work,
                      std::int64_t blocks, std::int64_t threads, std::int64_t cache_bytes) {
  const std::int64_t cached = cache_bytes / 2 / std::max<std::int64_t>(row_bytes, 1);
  const std::int64_t each =
      (cached < kLeastTaskRows ? kTaskRows : std::min(cached, kTaskRows)) / kRowTile * kRowTile;
  const std::int64_t row_parts = q4nx::ceil_div(rows, each);
  const std::int64_t most = kTasksPerThread * threads;
  const std::int64_t block_parts =
      std::min(q4nx::ceil_div(most, row_parts), tasks_of(blocks, block_work));
  if (block_parts < blocks) return {row_parts, block_parts};
  // Nine tasks for two threads would take as long as ten: so few blocks are cut in rows, too.
  const std::int64_t tasks = std::min(most, blocks * block_work / kLeastTaskWork);
  const std::int64_t cut = std::min(q4nx::ceil_div(tasks, blocks), rows / kLeastTaskRows);
  return {std::max(row_parts, cut), block_parts};
}

}  // namespace

std::shared_ptr<std::byte> allocate_weight(std::size_t bytes) {
  constexpr std::size_t kSeveralPages = std::size_t{8} << 20;
  constexpr std::align_val_t kAlignment{64};
  if (bytes >= kSeveralPages) return allocate_large_pages(bytes);
  return {static_cast<std::byte*>(::operator new(bytes, kAlignment)),
          [](std::byte* memory) { ::operator delete(memory, kAlignment); }};
}

RoundedActivations rounded_rows(const DenseRounding& rounding, std::int64_t k) {
  RoundedActivations a;
  a.padded_k = k;
  if (rounding.type == DenseType::kFloat) return a;
  a.part_columns = rounding.part_columns(k);
  a.padded_k = q4nx::ceil_div(k, a.part_columns) * a.part_columns;
  a.groups = a.padded_k / q4nx::kGroup;
  a.filled_groups = q4nx::ceil_div(k, q4nx::kGroup);
  return a;
}

// Memory of the rounded activations and of the packed columns of a panel.
struct DenseProduct::Work {
  RoundedActivations activations;
  std::byte* values = nullptr;
  float* scales = nullptr;
  float* sums = nullptr;
  std::byte* packed = nullptr;
  std::int64_t block_bytes = 0;
  std::int64_t panel_blocks = 0;
};

void DenseProduct::round_as_chosen(DataType weight, std::int64_t m) {
  // Rounding an element takes about as long as what so many products with it save. (2,048 rows of
  // 257 by 64 columns, AVX2: 1.3 ms rounded, 0.8 ms in f32.) Stored int8 is rounded already.
  constexpr std::int64_t kNarrow = 64;
  if (m <= kNarrow && weight != DataType::kInt8) return;
  const bool int8 = context_.activations == Activations::kInt8;
  rounding_ = context_.kernels.dense_rounding(int8, weight);
}

std::int64_t DenseProduct::element_bytes() const { return bytes_of_element(rounding_.type); }

DenseProduct::Work DenseProduct::take(Scratch& scratch, std::int64_t rows, std::int64_t k,
                                      std::int64_t m) const {
  Work work;
  if (rows <= few_rows_) return work;
  work.block_bytes = context_.kernels.dense_block_bytes(k, rounding_);
  const std::int64_t blocks = q4nx::ceil_div(m, kDenseColumns);
  const std::int64_t least = context_.pool->threads();
  work.panel_blocks =
      std::min(blocks, std::max(least, kPanelBytes / std::max<std::int64_t>(work.block_bytes, 1)));
  if (!kept_) work.packed = scratch.take<std::byte>(work.panel_blocks * work.block_bytes);
  work.activations = rows_of(k);
  RoundedActivations& a = work.activations;
  if (rounding_.type == DenseType::kFloat) return work;
  a.values = work.values = scratch.take<std::byte>(rows * a.padded_k * element_bytes());
  const std::int64_t parts = a.padded_k / a.part_columns;
  a.sums = work.sums = scratch.take<float>(rows * parts);
  if (rounding_.type == DenseType::kInt8)
    a.scales = work.scales = scratch.take<float>(rows * parts);
  return work;
}

std::size_t DenseProduct::scratch_bytes(std::int64_t rows, std::int64_t k, std::int64_t m) const {
  Scratch scratch;
  take(scratch, rows, k, m);
  return scratch.bytes();
}

void DenseProduct::round(const float* x, std::int64_t rows, std::int64_t k, Work& work) const {
  const RoundedActivations& a = work.activations;
  if (rounding_.type == DenseType::kFloat) {
    work.activations.values = x;
    return;
  }
  const Kernels& kernels = context_.kernels;
  const std::int64_t parts = a.padded_k / a.part_columns;
  const auto round_row = [&](std::int64_t row) {
    std::byte* values = work.values + row * a.padded_k * element_bytes();
    float* sums = work.sums + row * parts;
    if (rounding_.type == DenseType::kInt8) {
      const auto round = rounding_.is_unsigned ? kernels.round_to_unsigned : kernels.round_to_int8;
      round(x + row * k, k, a.padded_k, a.part_columns, rounding_.largest, values,
            work.scales + row * parts, sums);
    } else {
      kernels.round_to_bf16(x + row * k, k, a.padded_k, values, sums);
    }
  };
  context_.pool->run_rows(rows, round_row);
}

void DenseProduct::keep(const DenseWeight& weight) {
  const std::int64_t blocks = q4nx::ceil_div(weight.m, kDenseColumns);
  const std::int64_t bytes = context_.kernels.dense_block_bytes(weight.k, rounding_) * blocks;
  if (bytes == 0) return;
  kept_ = allocate_weight(static_cast<std::size_t>(bytes));
  pack(weight, 0, blocks, kept_.get());
  // Stored int8 is widened to f32, which takes longer than reading what is packed.
  if (weight.type == DataType::kInt8 && rounding_.type == DenseType::kInt8) few_rows_ = 0;
}

void DenseProduct::pack(const DenseWeight& weight, std::int64_t first_block, std::int64_t blocks,
                        std::byte* packed) const {
  const std::int64_t block_bytes = context_.kernels.dense_block_bytes(weight.k, rounding_);
  const std::int64_t tasks = tasks_of(blocks, weight.k * kDenseColumns);
  context_.pool->run(tasks, [&](std::int64_t task) {
    const auto [begin, end] = part(blocks, tasks, task);
    for (std::int64_t i = begin; i < end; ++i)
      context_.kernels.pack_dense(weight, first_block + i, rounding_, packed + i * block_bytes);
  });
}

void DenseProduct::run(const float* x, std::int64_t rows, const DenseWeight& weight,
                       ProductEpilogue epilogue, std::byte* memory) const {
  if (rows == 0 || weight.m == 0) return;
  if (rows <= few_rows_) return multiply_few(x, rows, weight, epilogue);
  epilogue.streamed =
      rows * weight.m * static_cast<std::int64_t>(sizeof(float)) > kStreamedDenseBytes;
  Scratch scratch(memory);
  Work work = take(scratch, rows, weight.k, weight.m);
  round(x, rows, weight.k, work);
  const std::int64_t blocks = q4nx::ceil_div(weight.m, kDenseColumns);
  if (kept_) return multiply(work, kept_.get(), 0, blocks, rows, epilogue);
  for (std::int64_t block = 0; block < blocks; block += work.panel_blocks) {
    const std::int64_t count = std::min(work.panel_blocks, blocks - block);
    pack(weight, block, count, work.packed);
    multiply(work, work.packed, block, count, rows, epilogue);
  }
}

void DenseProduct::run_rounded(const RoundedActivations& activations, std::int64_t rows,
                               const ProductEpilogue& epilogue) const {
  if (rows == 0 || epilogue.m == 0) return;
  Work work;
  work.activations = activations;
  work.block_bytes = context_.kernels.dense_block_bytes(activations.padded_k, rounding_);
  multiply(work, kept_.get(), 0, q4nx::ceil_div(epilogue.m, kDenseColumns), rows, epilogue);
}

void DenseProduct::multiply(const Work& work, const std::byte* packed, std::int64_t first_block,
                            std::int64_t blocks, std::int64_t rows,
                            const ProductEpilogue& epilogue) const {
  const std::int64_t padded_k = work.activations.padded_k;
  const std::int64_t row_bytes = padded_k * element_bytes();
  const MatMulPlan plan = plan_dense(rows, row_bytes, rows * padded_k * kDenseColumns, blocks,
                                     context_.pool->threads(), cache_bytes_);
  context_.pool->run(plan.row_parts * plan.block_parts, [&](std::int64_t task) {
    const Interval tiles =
        part(q4nx::ceil_div(rows, kRowTile), plan.row_parts, task / plan.block_parts);
    const std::int64_t first = tiles.begin * kRowTile;
    const std::int64_t last = std::min(tiles.end * kRowTile, rows);
    const auto [begin, end] = part(blocks, plan.block_parts, task % plan.block_parts);
    alignas(64) float product[kTaskRows * kDenseColumns];
    // With K = 0 a kernel has nothing to add up, and writes nothing.
    if (row_bytes == 0) std::fill(std::begin(product), std::end(product), 0.0F);
    for (std::int64_t block = begin; block < end; ++block) {
      const std::int64_t column = (first_block + block) * kDenseColumns;
      context_.kernels.matmul_dense(packed + block * work.block_bytes, rounding_.type,
                                    work.activations, first, last - first,
                                    std::min(kDenseColumns, epilogue.m - column), product);
      context_.kernels.finish_product(product, 1, first, last - first, column, epilogue);
    }
  });
}

// Each task multiplies some columns, a block at a time. All threads get as many tasks, because
// there are few.
void DenseProduct::multiply_few(const float* x, std::int64_t rows, const DenseWeight& weight,
                                const ProductEpilogue& epilogue) const {
  const std::int64_t blocks = q4nx::ceil_div(weight.m, kDenseColumns);
  const std::int64_t threads = context_.pool->threads();
  const std::int64_t least = tasks_of(blocks, weight.k * kDenseColumns, kLeastFewElements);
  const std::int64_t each = std::min(q4nx::ceil_div(least, threads), kTasksPerThread);
  const std::int64_t tasks = least == 1 ? 1 : std::min(blocks, each * threads);
  context_.pool->run(tasks, [&](std::int64_t task) {
    const auto [begin, end] = part(blocks, tasks, task);
    alignas(64) float product[kFewRows * kDenseColumns] = {};
    for (std::int64_t block = begin; block < end; ++block) {
      const std::int64_t column = block * kDenseColumns;
      context_.kernels.dense_rows(weight, x, rows, column,
                                  std::min(column + kDenseColumns, weight.m), product);
      context_.kernels.finish_product(product, 1, 0, rows, column, epilogue);
    }
  });
}

}  // namespace flownpu::cpu
