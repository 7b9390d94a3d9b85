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
