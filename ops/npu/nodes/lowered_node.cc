// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/nodes/lowered_node.h"

#include <algorithm>
#include <cstring>

#include "ops/error.h"
#include "ops/formats/numbers.h"

namespace flownpu::npu {

std::span<std::byte> PackedWriter::take(std::size_t count) {
  const std::span<std::byte> taken(at_, count);
  at_ += count;
  return taken;
}

void PackedWriter::bytes(const std::byte* from, std::size_t count) {
  std::memcpy(take(count).data(), from, count);
}

void PackedWriter::zeros(std::size_t count) { std::memset(take(count).data(), 0, count); }

void PackedWriter::bfloat16(const float* values, std::int64_t count) {
  if (values == nullptr) {
    zeros(static_cast<std::size_t>(count) * kBFloat16Bytes);
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint16_t bits = to_bfloat16(values[i]);
    std::memcpy(take(kBFloat16Bytes).data(), &bits, kBFloat16Bytes);
  }
}

void PackedWriter::line(const float* values, std::int64_t count, std::int64_t line) {
  bfloat16(values, count);
  zeros(static_cast<std::size_t>(line - count) * kBFloat16Bytes);
}

std::int64_t size_attribute(const Node& node, std::string_view attribute, std::int64_t most) {
  const std::int64_t size = node.required_integer(attribute);
  if (size < 1 || size > most)
    fail("[", to_string(node), "] expected ", attribute, " of 1 to ", most, ", got ", size);
  return size;
}

void check_values(const Node& node, const char* what, const std::vector<Value>& values,
                  const std::vector<std::vector<DataType>>& types) {
  if (values.size() != types.size())
    fail("[", to_string(node), "] expected ", types.size(), " ", what, "s, got ", values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i].name.empty() || std::ranges::find(types[i], values[i].type) == types[i].end())
      fail("[", to_string(node), "] expected ", what, " ", i, " to be ", name_of(types[i].front()),
           ", got ", values[i].name.empty() ? "none" : name_of(values[i].type));
  }
}

const Packed& packed(const Node& node, std::string_view name, std::size_t bytes) {
  const auto found = std::ranges::find(node.packed, name, &Packed::name);
  if (found == node.packed.end())
    fail("[", to_string(node), "] expected packed ", name, ", there are none: convert again");
  if (found->bytes != bytes)
    fail("[", to_string(node), "] expected ", bytes, " bytes of packed ", name, ", got ",
         found->bytes, ": compile again");
  return *found;
}

std::unique_ptr<Buffer> upload(Runtime& runtime, const Packed& packed) {
  std::unique_ptr<Buffer> buffer = runtime.allocate(packed.bytes);
  packed.write(buffer->bytes());
  buffer->to_device(0, packed.bytes);
  return buffer;
}

}  // namespace flownpu::npu
