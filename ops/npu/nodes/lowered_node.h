// SPDX-License-Identifier: Apache-2.0
// Nodes that the NPU device makes for itself: their domain, and their constants in the array's
// order (Node::packed). A constant is described when its node is made; prepare() finds, writes and
// uploads it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "ops/nodes/node.h"
#include "ops/npu/driver/runtime.h"

namespace flownpu::npu {

inline constexpr std::string_view kNpuDomain = "ai.flownpu.npu";

inline constexpr std::size_t kBFloat16Bytes = 2;

constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Writes values to memory, one after the other.
class PackedWriter {
 public:
  explicit PackedWriter(std::span<std::byte> memory) : at_(memory.data()) {}

  void zeros(std::size_t count);
  // Rounds to the nearest, ties to even. `values` may be null: zeros.
  void bfloat16(const float* values, std::int64_t count);
  // `count` values, and zeros up to `line` elements.
  void line(const float* values, std::int64_t count, std::int64_t line);
  // The next `count` bytes, for the caller to write.
  std::span<std::byte> take(std::size_t count);

 private:
  std::byte* at_;
};

// The node's packed constant of this name. Throws Error if it has none, or one of another size.
const Packed& packed(const Node& node, std::string_view name, std::size_t bytes);

// A new buffer of the device with the constant in it.
std::unique_ptr<Buffer> upload(Runtime& runtime, const Packed& packed);

}  // namespace flownpu::npu
