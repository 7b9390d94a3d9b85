// SPDX-License-Identifier: Apache-2.0
#include "ops/lowering/quantized_weight.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <sstream>
#include <thread>
#include <unordered_map>
#include <utility>

#include "ops/error.h"
#include "ops/number_formats.h"
#include "ops/q4nx.h"

namespace flownpu::lowering {
namespace {

// 2^(bits - 1), the operators' own default.
constexpr float kDefaultZeroPoint = 8;
// The one block_size that weights are quantised again from: the least that ORT's kernels take.
constexpr std::int64_t kSmallBlock = 16;
// Of weights that are quantised again: beyond, a minimum might become infinite when it is rounded.
constexpr float kLargestWeight = 0x1p127F;
// While the bytes are not there yet; no one reads them.
constexpr std::byte kToBeMade{};

int nibble(const void* packed, std::int64_t index) {
  const auto byte = static_cast<const std::uint8_t*>(packed)[index / 2];
  return index % 2 == 0 ? byte & 15 : byte >> 4;
}

std::int64_t elements_of(const Value& value) { return value.shape ? value.shape->elements() : 0; }

bool same_bytes(const Value& a, const Value& b) {
  if (a.name.empty() || b.name.empty()) return a.name.empty() && b.name.empty();
  const std::int64_t elements = elements_of(a);
  return a.type == b.type && elements == elements_of(b) &&
         (a.constant == b.constant ||
          std::memcmp(a.constant, b.constant,
                      static_cast<std::size_t>(elements) * size_of(a.type)) == 0);
}

// The same weight, perhaps in another copy: ORT folds a Reshape of a constant into one.
bool same(const QuantizedWeight& a, const QuantizedWeight& b) {
  return a.rows == b.rows && a.columns == b.columns && a.block_size == b.block_size &&
         same_bytes(a.scales, b.scales) && same_bytes(a.zero_points, b.zero_points) &&
         same_bytes(a.codes, b.codes);
}

std::size_t packed_bytes(const QuantizedWeight& weight, const q4nx::Layout& layout) {
  return static_cast<std::size_t>(q4nx::row_blocks(weight.rows) * layout.row_bytes(weight.columns));
}

// Weights begin at pages, as in the files that others are mapped from: kernels read whole cache
// lines, and what begins in the middle of one costs two of them each time.
constexpr std::size_t kAlignment = 4096;
// The large pages of x86-64. A step of decoding reads every weight once, in order: with pages of
// 4 KiB it waits for as many translations. Files are mapped in larger ones already.
constexpr std::size_t kLargePage = std::size_t{2} << 20;

constexpr std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// Not initialised; in large pages where the system has them.
std::shared_ptr<std::byte> allocate(std::size_t bytes) {
  const std::size_t size = round_up(bytes, kLargePage);
  void* memory = std::aligned_alloc(kLargePage, size);
  if (memory == nullptr) throw std::bad_alloc();
  (void)::madvise(memory, size, MADV_HUGEPAGE);  // advice: without it the same, but slower
  return {static_cast<std::byte*>(memory), std::free};
}

// Calls work(i) for 0 <= i < count on all cores.
template <typename Work>
void parallel(std::size_t count, const Work& work) {
  std::atomic<std::size_t> next = 0;
  const auto run = [&] {
    for (std::size_t i = next++; i < count; i = next++) work(i);
  };
  std::vector<std::jthread> others;
  for (unsigned i = 1; i < std::thread::hardware_concurrency(); ++i) others.emplace_back(run);
  run();
}

}  // namespace

std::int64_t QuantizedWeight::blocks() const { return q4nx::ceil_div(columns, block_size); }

std::string QuantizedWeight::obstacle() const {
  std::ostringstream text;
  for (const Value* value : {&codes, &scales, &zero_points}) {
    if (!value->name.empty() && value->constant == nullptr) {
      text << value->name << " is not a constant of the model";
      return text.str();
    }
  }
  if (rows <= 0 || columns <= 0 || block_size <= 0 ||
      (block_size % q4nx::kGroup != 0 && block_size != kSmallBlock)) {
    text << "block_size=" << block_size << ": Q4NX has one scale for " << q4nx::kGroup
         << " columns; export with a block_size that is a multiple of " << q4nx::kGroup;
    return text.str();
  }
  if (codes.type != DataType::kUInt8 || scales.type != DataType::kFloat32) {
    text << "codes and scales are " << name_of(codes.type) << " and " << name_of(scales.type)
         << ", expected uint8 and float; export with float32 inputs and outputs";
    return text.str();
  }
  const bool packed_points = zero_points.type == DataType::kUInt8;
  if (!zero_points.name.empty() && !packed_points && zero_points.type != DataType::kFloat32) {
    text << "zero points are " << name_of(zero_points.type) << ", expected uint8 or float";
    return text.str();
  }
  const auto wrong = [&](const Value& value, std::int64_t expected) {
    if (value.name.empty() || elements_of(value) == rows * expected) return false;
    text << value.name << " has " << elements_of(value) << " elements, expected " << rows * expected
         << " for " << rows << " rows of " << columns << " columns in blocks of " << block_size;
    return true;
  };
  if (wrong(codes, blocks() * block_size / 2) || wrong(scales, blocks()) ||
      wrong(zero_points, packed_points ? q4nx::ceil_div(blocks(), 2) : blocks())) {
    return text.str();
  }
  const auto* values = static_cast<const float*>(scales.constant);
  const bool fit = std::all_of(values, values + rows * blocks(), [](float scale) {
    return std::isfinite(from_bfloat16(to_bfloat16(scale)));
  });
  if (!fit) return scales.name + " holds a scale that is not finite, or too large for bf16";
  if (keeps_codes()) return "";
  // What is quantised again has to be finite itself.
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t block = 0; block < blocks(); ++block) {
      const float largest =
          values[row * blocks() + block] * (std::abs(zero_point(row, block)) + q4nx::kLargestCode);
      if (!(std::abs(largest) <= kLargestWeight))
        return scales.name + " makes a weight that is not finite, or too large for bf16";
    }
  }
  return "";
}

float QuantizedWeight::zero_point(std::int64_t row, std::int64_t block) const {
  if (zero_points.name.empty()) return kDefaultZeroPoint;
  if (zero_points.type == DataType::kFloat32)
    return static_cast<const float*>(zero_points.constant)[row * blocks() + block];
  // Each row begins with a byte of its own.
  return static_cast<float>(
      nibble(zero_points.constant, row * q4nx::ceil_div(blocks(), 2) * 2 + block));
}

bool QuantizedWeight::keeps_codes() const { return block_size % q4nx::kGroup == 0; }

q4nx::Layout QuantizedWeight::layout() const {
  if (!keeps_codes()) return q4nx::kNarrow;
  if (zero_points.name.empty()) return q4nx::kSymmetric;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t block = 0; block < blocks(); ++block) {
      if (zero_point(row, block) != kDefaultZeroPoint) return q4nx::kNarrow;
    }
  }
  return q4nx::kSymmetric;
}

double QuantizedWeight::pack(std::byte* blocks_out, const q4nx::Layout& layout) const {
  std::memset(blocks_out, 0, packed_bytes(*this, layout));
  Difference all;
  for (std::int64_t row = 0; row < rows; ++row)
    pack_row(row, blocks_out + row / q4nx::kBlockRows * layout.row_bytes(columns), layout, all);
  return all.squares > 0 ? std::sqrt(all.squared_error / all.squares) : 0;
}

float QuantizedWeight::weight(std::int64_t row, std::int64_t column) const {
  const std::int64_t block = column / block_size;
  const int code = nibble(codes.constant, row * blocks() * block_size + column);
  return static_cast<const float*>(scales.constant)[row * blocks() + block] *
         (static_cast<float>(code) - zero_point(row, block));
}

// The columns from `first` on, as Q4NX has them with their codes unchanged.
Q4NXGroup QuantizedWeight::group(std::int64_t row, std::int64_t first) const {
  const std::int64_t block = first / block_size;
  Q4NXGroup group;
  group.scale = to_bfloat16(static_cast<const float*>(scales.constant)[row * blocks() + block]);
  group.minimum = to_bfloat16(-from_bfloat16(group.scale) * zero_point(row, block));
  const std::int64_t row_codes = row * blocks() * block_size;
  for (std::int64_t k = first; k < std::min(first + q4nx::kGroup, columns); ++k) {
    group.codes[static_cast<std::size_t>(k - first)] =
        static_cast<std::uint8_t>(nibble(codes.constant, row_codes + k));
  }
  return group;
}

// The same, quantised again.
Q4NXGroup QuantizedWeight::new_group(std::int64_t row, std::int64_t first,
                                     Difference& difference) const {
  std::array<float, q4nx::kGroup> weights{};
  const auto count = static_cast<std::size_t>(std::min(q4nx::kGroup, columns - first));
  for (std::size_t i = 0; i < count; ++i)
    weights[i] = weight(row, first + static_cast<std::int64_t>(i));
  const Q4NXGroup group = quantize_group(std::span<const float>(weights).first(count));
  for (std::size_t i = 0; i < count; ++i) {
    const double error = double{group.weight(i)} - double{weights[i]};
    difference.squares += double{weights[i]} * double{weights[i]};
    difference.squared_error += error * error;
  }
  return group;
}

// One row: its scale and minimum in each group, and its nibble in each column's bytes.
void QuantizedWeight::pack_row(std::int64_t row, std::byte* row_of_blocks,
                               const q4nx::Layout& layout, Difference& difference) const {
  const std::int64_t in_block = row % q4nx::kBlockRows;
  const std::int64_t in_codes =
      in_block / q4nx::kStripRows * layout.strip_bytes() + in_block % q4nx::kStripRows / 2;
  const int shift = in_block % 2 == 0 ? 0 : 4;
  for (std::int64_t first = 0; first < columns; first += q4nx::kGroup) {
    const Q4NXGroup made = keeps_codes() ? group(row, first) : new_group(row, first, difference);
    const std::int64_t number = first / q4nx::kGroup;
    std::byte* scale = row_of_blocks + layout.scales_at(number) + in_block * 2;
    std::memcpy(scale, &made.scale, 2);
    if (layout.has_minima) std::memcpy(scale + layout.minimum_offset(), &made.minimum, 2);
    std::byte* codes_of_row = row_of_blocks + layout.codes_at(number) + in_codes;
    for (std::size_t i = 0; i < made.codes.size(); ++i)
      codes_of_row[i * q4nx::kColumnBytes] |= static_cast<std::byte>(made.codes[i] << shift);
  }
}

std::size_t RepackedWeights::Part::bytes(const q4nx::Layout& layout) const {
  return static_cast<std::size_t>(q4nx::row_blocks(rows) * layout.row_bytes(columns));
}

double RepackedWeights::Part::pack(std::byte* blocks, const q4nx::Layout& layout) const {
  if (const auto* weight = std::get_if<QuantizedWeight>(&source))
    return weight->pack(blocks, layout);
  std::memcpy(blocks, std::get<Value>(source).constant, bytes(layout));
  return 0;
}

Value RepackedWeights::add(const QuantizedWeight& weight) {
  auto found = std::ranges::find_if(constants_, [&](const auto& named) {
    const std::vector<Part>& parts = named.second.parts;
    const auto* made = std::get_if<QuantizedWeight>(&parts.front().source);
    return parts.size() == 1 && made != nullptr && same(*made, weight);
  });
  if (found == constants_.end()) {
    Constant constant{{{weight, weight.rows, weight.columns}}, weight.layout()};
    std::string name = weight.codes.name + ".q4nx";
    while (constants_.contains(name)) name += '\'';  // the same codes, but other scales
    found = constants_.emplace(std::move(name), std::move(constant)).first;
  }
  const auto& [name, constant] = *found;
  Value value;
  value.name = name;
  value.type = DataType::kUInt8;
  value.shape = q4nx::blocks_shape(weight.rows, weight.columns, constant.layout);
  value.constant = &kToBeMade;
  return value;
}

std::optional<RepackedWeights::Constant> RepackedWeights::constant_of(const Node& product) const {
  const Value& weight = product.inputs[1];
  if (weight.constant == &kToBeMade) return constants_.at(weight.name);
  const std::int64_t rows = product.required_integer("M");
  const std::int64_t columns = product.required_integer("K");
  if (weight.constant == nullptr || weight.type != DataType::kUInt8 || !weight.shape)
    return std::nullopt;
  const auto layout = q4nx::layout_of(*weight.shape);
  if (!layout || !(*weight.shape == q4nx::blocks_shape(rows, columns, *layout)))
    return std::nullopt;
  return Constant{{{weight, rows, columns}}, *layout};
}

std::optional<Value> RepackedWeights::join(const std::vector<const Node*>& products) {
  std::vector<Constant> constants;
  for (const Node* product : products) {
    std::optional<Constant> constant = constant_of(*product);
    if (!constant) return std::nullopt;
    constants.push_back(std::move(*constant));
  }
  const auto is_native = [](const Constant& constant) { return constant.parts[0].is_native(); };
  const std::int64_t columns = constants.front().parts.front().columns;
  // What is written anew can have minima or not; what is copied has what it has.
  const auto native = std::ranges::find_if(constants, is_native);
  Constant joined{{}, native != constants.end() ? native->layout : q4nx::kSymmetric};
  for (const Constant& constant : constants) {
    if (constant.parts.front().columns != columns) return std::nullopt;
    if (native == constants.end() && constant.layout.has_minima) joined.layout = q4nx::kNarrow;
  }
  std::int64_t row_blocks = 0;
  Value value = products.front()->inputs[1];
  for (std::size_t i = 0; i < constants.size(); ++i) {
    const bool fits = is_native(constants[i])
                          ? constants[i].layout == joined.layout
                          : joined.layout.has_minima || !constants[i].layout.has_minima;
    if (!fits) return std::nullopt;
    for (const Part& part : constants[i].parts) {
      row_blocks += q4nx::row_blocks(part.rows);
      joined.parts.push_back(part);
    }
    if (i > 0) value.name += "+" + products[i]->inputs[1].name;
  }
  value.shape = q4nx::blocks_shape(row_blocks * q4nx::kBlockRows, columns, joined.layout);
  value.constant = &kToBeMade;
  constants_.emplace(value.name, std::move(joined));
  return value;
}

void RepackedWeights::make(std::vector<Node>& nodes) {
  std::unordered_map<std::string, std::size_t> offsets;
  std::vector<std::pair<Value*, std::size_t>> readers;
  std::size_t end = 0;
  for (Node& node : nodes) {
    for (Value& value : node.inputs) {
      if (value.constant != &kToBeMade) continue;
      const auto [entry, is_new] = offsets.try_emplace(value.name, end);
      if (is_new) end += round_up(static_cast<std::size_t>(elements_of(value)), kAlignment);
      readers.emplace_back(&value, entry->second);
    }
  }
  if (readers.empty()) return;
  const std::shared_ptr<std::byte> memory = allocate(end);  // pack() writes all that is read
  for (const auto& [value, offset] : readers) {
    value->constant = memory.get() + offset;
    value->owner = memory;
  }
  struct Piece {
    const Part* part;
    const q4nx::Layout* layout;
    std::byte* memory;

    std::size_t bytes() const { return part->bytes(*layout); }
  };
  std::vector<Piece> pieces;
  for (const auto& [name, offset] : offsets) {
    std::byte* next = memory.get() + offset;
    const auto& [parts, layout] = constants_.at(name);
    for (const Part& part : parts) {
      pieces.push_back({&part, &layout, next});
      next += pieces.back().bytes();
    }
  }
  // The largest first, so that the cores end together.
  std::ranges::sort(pieces, std::ranges::greater(), &Piece::bytes);
  std::vector<double> errors(pieces.size());
  parallel(pieces.size(), [&](std::size_t i) {
    const Piece& piece = pieces[i];
    errors[i] = piece.part->pack(piece.memory, *piece.layout);
  });
  for (const Piece& piece : pieces) {
    const auto* weight = std::get_if<QuantizedWeight>(&piece.part->source);
    made_ += weight != nullptr ? 1 : 0;
    quantized_again_ += weight != nullptr && !weight->keeps_codes() ? 1 : 0;
  }
  largest_error_ = errors.empty() ? 0 : std::ranges::max(errors);
}

}  // namespace flownpu::lowering
