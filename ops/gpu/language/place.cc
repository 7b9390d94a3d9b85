// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/language/place.h"

#include <utility>

#include "ops/gpu/language/text.h"
#include "ops/nodes/flow_qkv_attention.h"

namespace flownpu::gpu {
namespace {

std::string text(const Size& size) {
  if (const auto* number = std::get_if<std::int64_t>(&size)) return text_of(*number);
  return std::get<std::string>(size);
}

}  // namespace

std::string index_of(const TensorDescription& tensor, const std::vector<std::string>& at) {
  std::string index = at.front();
  for (std::size_t axis = 1; axis < at.size(); ++axis) {
    const bool has_scale = tensor.element == Element::kInt8Rows && axis + 1 == at.size();
    const std::string size =
        has_scale ? text_of(std::get<std::int64_t>(tensor.sizes[axis]) + kInt8ScaleBytes)
                  : text(tensor.sizes[axis]);
    index = text_of("(", index, " * ", size, " + ", at[axis], ")");
  }
  return index;
}

std::string scale_of_row(const TensorDescription& tensor, std::vector<std::string> row) {
  row.push_back(text_of(std::get<std::int64_t>(tensor.sizes.back()) + kInt8ScaleBytes / 2));
  return index_of(tensor, row);
}

WeightPlaces::WeightPlaces(const TensorDescription& weight, std::string row, std::string second)
    : layout_(weight.layout),
      row_bytes_(weight.layout.row_bytes(std::get<std::int64_t>(weight.sizes[1]))),
      row_(std::move(row)),
      second_(std::move(second)) {}

std::string WeightPlaces::at_group(const std::string& group, std::int64_t each) const {
  const std::int64_t groups = layout_.groups_per_block();
  const std::string row = text_of(row_, " / ", q4nx::kBlockRows, " * ", row_bytes_);
  if (groups == 1) return text_of(row, " + ", group, " * ", layout_.block_bytes());
  return text_of(row, " + ", group, " / ", groups, " * ", layout_.block_bytes(), " + ", group,
                 " % ", groups, " * ", each);
}

std::string WeightPlaces::scale() const {
  return text_of("(", at_group(second_, q4nx::kParameterBytes), " + ", row_, " % ",
                 q4nx::kBlockRows, " * 2)");
}

std::string WeightPlaces::minimum() const {
  return text_of("(", scale(), " + ", layout_.minimum_offset(), ")");
}

std::string WeightPlaces::codes() const {
  const std::string group = text_of("(", second_, " / ", q4nx::kGroup, ")");
  return text_of("(", at_group(group, q4nx::kGroupStripBytes), " + ", layout_.code_offset(), " + ",
                 row_, " % ", q4nx::kBlockRows, " / ", q4nx::kStripRows, " * ",
                 layout_.strip_bytes(), " + ", second_, " % ", q4nx::kGroup, " * ",
                 q4nx::kColumnBytes, ")");
}

std::string WeightPlaces::byte_code() const {
  const std::string group = text_of("(", second_, " / ", q4nx::kGroup, ")");
  return text_of("(", at_group(group, 0), " + ", layout_.code_offset(), " + ", second_, " % ",
                 q4nx::kGroup, " / 4 * ", q4nx::kByteQuadBytes, " + ", row_, " % 2 * ",
                 q4nx::kByteQuadBytes / 2, " + ", row_, " % ", q4nx::kBlockRows, " / 2 * 4 + ",
                 second_, " % 4)");
}

std::string WeightPlaces::table() const {
  const std::string group = text_of("(", second_, " / ", q4nx::kGroup, ")");
  return text_of("(", at_group(group, 0), " + ", layout_.block_bytes() - q4nx::kTableBytes, ")");
}

}  // namespace flownpu::gpu
