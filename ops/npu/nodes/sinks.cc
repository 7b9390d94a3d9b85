// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/nodes/sinks.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <numbers>
#include <vector>

#include "ops/error.h"

namespace flownpu::npu {
namespace {

// The rows of a chunk of up to 64 keys begin 2 elements after one another (SINK_PADDING of
// aie/designs/attention.py).
constexpr std::int64_t kPadding = 128;
// The kernels' scores are below it in size (aie/kernels/common/attention.h).
constexpr double kLargest = 1e6;

}  // namespace

std::int64_t sink_elements(std::int64_t kv_heads, std::int64_t head_size) {
  return kv_heads * head_size + kPadding;
}

void write_sinks(std::span<const float> sinks, std::int64_t kv_heads, std::int64_t head_size,
                 PackedWriter& writer) {
  const std::size_t group = sinks.size() / static_cast<std::size_t>(kv_heads);
  if (static_cast<std::int64_t>(4 * group) > head_size)
    fail("[FlowNPU] expected ", head_size / 4,
         " query heads or fewer to a KV head with sinks, got ", group);
  for (std::int64_t head = 0; head < kv_heads; ++head, sinks = sinks.subspan(group)) {
    std::vector<float> numbers(static_cast<std::size_t>(head_size) / 2);
    for (std::size_t i = 0; i < group; ++i) {
      const double t = std::min(sinks[i] * std::numbers::log2e, kLargest);
      const double m = std::max(std::ceil(t), -kLargest);
      numbers[i] = static_cast<float>(m);
      numbers[group + i] = std::exp2(static_cast<float>(t - m));
    }
    const auto bytes = std::as_bytes(std::span(numbers));
    std::memcpy(writer.take(bytes.size()).data(), bytes.data(), bytes.size());
  }
  writer.zeros(kPadding * kBFloat16Bytes);
}

}  // namespace flownpu::npu
