// SPDX-License-Identifier: Apache-2.0
#include "ops/lowering/weights/quantized_weight.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <sstream>

#include "ops/error.h"
#include "ops/formats/numbers.h"
#include "ops/formats/q4nx.h"
#include "ops/nodes/quantization.h"

namespace flownpu::lowering {
namespace {

// The largest weight that is quantised again: for larger ones a minimum might round to infinity.
constexpr float kLargestWeight = 0x1p127F;
std::int64_t elements_of(const Value& value) { return value.shape ? value.shape->elements() : 0; }

}  // namespace

int QuantizedWeight::element(const Value& value, std::int64_t index) const {
  // A signed code plus half of all codes is the code with its highest bit flipped.
  if (bits == 8) {
    return static_cast<const std::uint8_t*>(value.constant)[index] ^
           (value.type == DataType::kInt8 ? 128 : 0);
  }
  const bool high_first = table != nullptr && !of_onnx_types;
  return nibble_at(value.constant, high_first ? index ^ 1 : index) ^
         (value.type == DataType::kInt4 ? 8 : 0);
}

std::int64_t QuantizedWeight::blocks() const { return q4nx::ceil_div(columns, block_size); }

std::string QuantizedWeight::obstacle() const {
  std::ostringstream text;
  for (const Value* value : {&codes, &scales, &zero_points}) {
    if (!value->name.empty() && value->constant == nullptr) {
      text << value->name << " is not a constant of the model";
      return text.str();
    }
  }
  const bool is_small = bits == 4 && block_size == kSmallBlock && table == nullptr;
  if (rows <= 0 || columns <= 0 || block_size <= 0 ||
      (block_size % q4nx::kGroup != 0 && !is_small)) {
    text << "block_size=" << block_size << ": Q4NX has one scale for " << q4nx::kGroup
         << " columns; export with a block_size that is a multiple of " << q4nx::kGroup;
    return text.str();
  }
  const bool has_powers = table != nullptr && scales.type == DataType::kFloat8E8M0;
  if ((codes.type != DataType::kUInt8 && !of_onnx_types) ||
      (scales.type != DataType::kFloat32 && !has_powers)) {
    text << "codes and scales are " << name_of(codes.type) << " and " << name_of(scales.type)
         << ", expected uint8 and float; export with float32 inputs and outputs";
    return text.str();
  }
  if (!zero_points.name.empty() && zero_points.type != codes.type &&
      (of_onnx_types || zero_points.type != DataType::kFloat32)) {
    text << "zero points are " << name_of(zero_points.type) << ", expected " << name_of(codes.type)
         << (of_onnx_types ? "" : " or float");
    return text.str();
  }
  const bool has_one_scale = of_onnx_types && elements_of(scales) == 1;
  const auto wrong = [&](const Value& value, std::int64_t expected) {
    if (value.name.empty() || elements_of(value) == rows * expected) return false;
    if (has_one_scale && elements_of(value) == 1) return false;
    text << value.name << " has " << elements_of(value) << " elements, expected " << rows * expected
         << " for " << rows << " rows of " << columns << " columns in blocks of " << block_size;
    return true;
  };
  const bool padded_points = zero_points.type == DataType::kUInt8 && !of_onnx_types;
  if (wrong(codes, of_onnx_types ? columns : blocks() * block_size * bits / 8) ||
      wrong(scales, blocks()) ||
      wrong(zero_points, padded_points ? q4nx::ceil_div(blocks() * bits, 8) : blocks())) {
    return text.str();
  }
  return "";
}

std::string QuantizedWeight::damage() const {
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t block = 0; block < blocks(); ++block) {
      if (!std::isfinite(from_bfloat16(to_bfloat16(scale(row, block)))))
        return scales.name + " holds a scale that is not finite, or too large for bf16";
    }
  }
  if (keeps_codes()) return "";
  // Weights that are quantised again must be finite themselves.
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t block = 0; block < blocks(); ++block) {
      const float largest =
          scale(row, block) * (std::abs(zero_point(row, block)) + q4nx::kLargestCode);
      if (!(std::abs(largest) <= kLargestWeight))
        return scales.name + " makes a weight that is not finite, or too large for bf16";
    }
  }
  return "";
}

std::int64_t QuantizedWeight::rows_of_factor() const {
  const std::int64_t all = elements_of(codes) / columns;
  return factors.name.empty() ? all : all / elements_of(factors);
}

std::int64_t QuantizedWeight::scale_index(std::int64_t row, std::int64_t block) const {
  if (elements_of(scales) == 1) return 0;
  return transposed && scales.type == DataType::kFloat32 ? block * rows + row
                                                         : at(row) * blocks() + block;
}

float QuantizedWeight::scale(std::int64_t row, std::int64_t block) const {
  const std::int64_t index = scale_index(row, block);
  float scale = scales.type == DataType::kFloat8E8M0
                    ? from_float8e8m0(static_cast<const std::uint8_t*>(scales.constant)[index])
                    : static_cast<const float*>(scales.constant)[index];
  if (!factors.name.empty())
    scale *= static_cast<const float*>(factors.constant)[at(row) / rows_of_factor()];
  return table != nullptr ? scale / table->steps : scale;
}

std::int8_t QuantizedWeight::table_value(std::size_t code) const {
  return static_cast<std::int8_t>(std::lround(table->steps * table->values[code]));
}

int QuantizedWeight::code(std::int64_t row, std::int64_t column) const {
  if (transposed) {
    const std::int64_t height = rows_of_factor();
    return element(codes, (at(row) / height * columns + column) * height + at(row) % height);
  }
  const std::int64_t row_codes = of_onnx_types ? columns : blocks() * block_size;
  return element(codes, at(row) * row_codes + column);
}

float QuantizedWeight::zero_point(std::int64_t row, std::int64_t block) const {
  if (zero_points.name.empty())
    return has_symmetric_points() ? static_cast<float>(symmetric_point()) : 0;
  if (zero_points.type == DataType::kFloat32)
    return static_cast<const float*>(zero_points.constant)[scale_index(row, block)];
  // Each row's zero points in bytes begin at a whole byte.
  const std::int64_t index = of_onnx_types
                                 ? scale_index(row, block)
                                 : at(row) * q4nx::ceil_div(blocks() * bits, 8) * 8 / bits + block;
  return static_cast<float>(element(zero_points, index));
}

// Whether absent zero points are in the middle of the codes.
bool QuantizedWeight::has_symmetric_points() const {
  return !of_onnx_types || codes.type == DataType::kInt4 || codes.type == DataType::kInt8;
}

bool QuantizedWeight::keeps_codes() const { return block_size % q4nx::kGroup == 0; }

q4nx::Layout QuantizedWeight::layout() const {
  if (table != nullptr) return q4nx::kTable;
  const q4nx::Layout with_minima = bits == 8 ? q4nx::kEightBitsWithMinima : q4nx::kNarrow;
  const q4nx::Layout symmetric = bits == 8 ? q4nx::kEightBits : q4nx::kSymmetric;
  if (!keeps_codes()) return with_minima;
  if (zero_points.name.empty()) return has_symmetric_points() ? symmetric : with_minima;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t block = 0; block < blocks(); ++block) {
      if (zero_point(row, block) != static_cast<float>(symmetric_point())) return with_minima;
    }
  }
  return symmetric;
}

QuantizedWeight QuantizedWeight::some_rows(std::int64_t first, std::int64_t step,
                                           std::int64_t count) const {
  QuantizedWeight some = *this;
  some.rows = count;
  some.first_row = first;
  some.row_step = step;
  return some;
}

double Difference::relative() const { return squares > 0 ? std::sqrt(squared_error / squares) : 0; }

Difference& Difference::operator+=(const Difference& other) {
  squares += other.squares;
  squared_error += other.squared_error;
  return *this;
}

void QuantizedWeight::pack(std::byte* blocks_out, const q4nx::Layout& layout, std::int64_t first,
                           std::int64_t count, Difference* difference) const {
  const std::int64_t row_bytes = layout.row_bytes(columns);
  std::memset(blocks_out + first * row_bytes, 0, static_cast<std::size_t>(count * row_bytes));
  for (std::int64_t i = first; table != nullptr && i < first + count; ++i) {
    for (std::int64_t group = 0; group < q4nx::groups_of(columns); ++group) {
      std::byte* values = blocks_out + i * row_bytes + layout.table_at(group);
      for (std::size_t code = 0; code < table->values.size(); ++code)
        values[code] = static_cast<std::byte>(table_value(code));
    }
  }
  const std::int64_t end = std::min(rows, (first + count) * q4nx::kBlockRows);
  for (std::int64_t row = first * q4nx::kBlockRows; row < end; ++row)
    pack_row(row, blocks_out + row / q4nx::kBlockRows * row_bytes, layout, difference);
}

float QuantizedWeight::weight(std::int64_t row, std::int64_t column) const {
  const std::int64_t block = column / block_size;
  if (table != nullptr)
    return table->steps * scale(row, block) *
           table->values[static_cast<std::size_t>(code(row, column))];
  return scale(row, block) * (static_cast<float>(code(row, column)) - zero_point(row, block));
}

// The Q4NX group of the columns from `first` on, with codes unchanged.
Q4NXGroup QuantizedWeight::group(std::int64_t row, std::int64_t first) const {
  const std::int64_t block = first / block_size;
  Q4NXGroup group;
  group.scale = to_bfloat16(scale(row, block));
  const float point = zero_point(row, block) - static_cast<float>(code_of_minimum());
  if (table == nullptr) group.minimum = to_bfloat16(-from_bfloat16(group.scale) * point);
  for (std::int64_t k = first; k < std::min(first + q4nx::kGroup, columns); ++k) {
    group.codes[static_cast<std::size_t>(k - first)] =
        static_cast<std::int8_t>(code(row, k) - code_of_minimum());
  }
  return group;
}

// The group of `row` from column `first` on, quantised from its float values.
Q4NXGroup QuantizedWeight::new_group(std::int64_t row, std::int64_t first) const {
  std::array<float, q4nx::kGroup> weights{};
  const auto count = static_cast<std::size_t>(std::min(q4nx::kGroup, columns - first));
  for (std::size_t i = 0; i < count; ++i)
    weights[i] = weight(row, first + static_cast<std::int64_t>(i));
  return quantize_group(std::span<const float>(weights).first(count));
}

void QuantizedWeight::measure(const Q4NXGroup& made, std::int64_t row, std::int64_t first,
                              Difference& difference) const {
  for (std::int64_t k = first; k < std::min(first + q4nx::kGroup, columns); ++k) {
    const double exact = weight(row, k);
    const auto i = static_cast<std::size_t>(k - first);
    float found = made.weight(i);
    if (table != nullptr) {
      const std::int8_t value = table_value(static_cast<std::size_t>(made.codes[i]));
      found = from_bfloat16(made.scale) * static_cast<float>(value);
    }
    const double error = double{found} - exact;
    difference.squares += exact * exact;
    difference.squared_error += error * error;
  }
}

void QuantizedWeight::pack_row(std::int64_t row, std::byte* row_of_blocks,
                               const q4nx::Layout& layout, Difference* difference) const {
  for (std::int64_t first = 0; first < columns; first += q4nx::kGroup) {
    const Q4NXGroup made = keeps_codes() ? group(row, first) : new_group(row, first);
    if (difference != nullptr) measure(made, row, first, *difference);
    put_group(made, row, first, layout, row_of_blocks);
  }
}

// Writes scale and minimum, and of 4 bits ORs the row's nibble into the bytes of each column.
void put_group(const Q4NXGroup& group, std::int64_t row, std::int64_t first,
               const q4nx::Layout& layout, std::byte* row_of_blocks) {
  const std::int64_t in_block = row % q4nx::kBlockRows;
  const std::int64_t in_strips =
      in_block / q4nx::kStripRows * layout.strip_bytes() + in_block % q4nx::kStripRows / 2;
  const int shift = in_block % 2 == 0 ? 0 : 4;
  const std::int64_t number = first / q4nx::kGroup;
  std::byte* scale = row_of_blocks + layout.scales_at(number) + in_block * 2;
  std::memcpy(scale, &group.scale, 2);
  if (layout.has_minima) std::memcpy(scale + layout.minimum_offset(), &group.minimum, 2);
  std::byte* codes = row_of_blocks + layout.codes_at(number);
  for (std::int64_t i = 0; i < q4nx::kGroup; ++i) {
    const auto code = static_cast<std::byte>(group.codes[static_cast<std::size_t>(i)]);
    if (layout.code_bits == 8) {
      codes[q4nx::Layout::byte_code_at(in_block, i)] = code;
    } else {
      codes[in_strips + i * q4nx::kColumnBytes] |= code << shift;
    }
  }
}

}  // namespace flownpu::lowering
