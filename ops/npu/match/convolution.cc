// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/match/convolution.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "ops/error.h"
#include "ops/npu/nodes/lowered_node.h"
#include "ops/npu/weights/dense.h"

namespace flownpu::npu {
namespace {

constexpr std::int64_t kPanel = 32;  // columns

bool all_are(const std::vector<std::int64_t>& values, std::int64_t expected) {
  return std::ranges::all_of(values, [&](std::int64_t value) { return value == expected; });
}

}  // namespace

bool is_convolution(const Node& node) {
  const bool is_standard = node.op_type == "Conv";
  if (!is_standard && node.op_type != "FusedConv") return false;
  return node.domain == kNpuDomain || node.domain == (is_standard ? "" : "com.microsoft");
}

bool takes_convolution(const Node& node) {
  const Shape weight = shape_of(node.input(1));
  const std::vector<std::int64_t> strides = node.integers("strides");
  const std::int64_t stride = strides.empty() ? 1 : strides.front();
  return weight.rank() == 4 && weight[1] % 2 == 0 && node.integer("group", 1) == 1 &&
         all_are(node.integers("dilations"), 1) && all_are(strides, stride) && stride <= 2 &&
         node.text("auto_pad", "NOTSET") == "NOTSET";
}

Node convolution_of_graph(Node node) {
  node.domain = node.op_type == "Conv" ? "" : "com.microsoft";
  return node;
}

std::int64_t ConvolutionSizes::line() const {
  return round_up(width + std::max(pad_left, pad_right), stride);
}
std::int64_t ConvolutionSizes::padded_lines() const {
  return height + std::max(pad_top, pad_bottom);
}
std::int64_t ConvolutionSizes::run(std::int64_t k_mt) const {
  return round_up(kernel_width * channels, k_mt);
}
std::int64_t ConvolutionSizes::padded_filters() const {
  return std::max(round_up(filters, kPanel), kLeastFilters);
}

ConvolutionSizes sizes_of_convolution(const Node& node) {
  const Value* weight = node.input(1);
  if (weight == nullptr || weight->constant == nullptr || weight->type != DataType::kFloat32)
    fail(to_string(node), ": expected filters that are an initializer, float");
  const Shape filters = shape_of(weight);
  const Shape x = shape_of(node.input(0));
  if (x.rank() != 4 || x[2] <= 0 || x[3] <= 0)
    fail(to_string(node),
         ": expected pictures of a height and width that the graph fixes, which the array's "
         "programs are made for");
  ConvolutionSizes sizes{.channels = filters[1],
                         .filters = filters[0],
                         .kernel_height = filters[2],
                         .kernel_width = filters[3],
                         .upsample = node.integer("upsample", 1),
                         .batch = std::max<std::int64_t>(x[0], 0)};
  sizes.height = x[2] * sizes.upsample;
  sizes.width = x[3] * sizes.upsample;
  const std::vector<std::int64_t> strides = node.integers("strides");
  if (!strides.empty()) sizes.stride = strides.front();
  std::vector<std::int64_t> pads = node.integers("pads");
  pads.resize(4);
  sizes.pad_top = pads[0];
  sizes.pad_left = pads[1];
  sizes.pad_bottom = pads[2];
  sizes.pad_right = pads[3];
  if (std::ranges::min(pads) < 0 || sizes.lines() < 1 || sizes.pixels() < 1)
    fail(to_string(node), ": expected windows that fit the padded picture, and no negative pads");
  return sizes;
}

Packed pack_filters(const Node& node) {
  const ConvolutionSizes sizes = sizes_of_convolution(node);
  const std::int64_t rows = sizes.kernel_height * sizes.run();
  const auto bytes = static_cast<std::size_t>(rows * sizes.padded_filters()) * kBFloat16Bytes;
  return {
      "weights", bytes,
      [=, owner = node.inputs[1].owner,
       data = static_cast<const float*>(node.inputs[1].constant)](std::span<std::byte> memory) {
        std::memset(memory.data(), 0, memory.size());
        const std::int64_t taps = sizes.kernel_height * sizes.kernel_width;
        std::vector<float> row(static_cast<std::size_t>(sizes.filters));
        for (std::int64_t tap = 0; tap < taps; ++tap) {
          const std::int64_t down = tap / sizes.kernel_width;
          const std::int64_t across = tap % sizes.kernel_width;
          for (std::int64_t channel = 0; channel < sizes.channels; ++channel) {
            for (std::size_t filter = 0; filter < row.size(); ++filter) {
              row[filter] =
                  data[(static_cast<std::int64_t>(filter) * sizes.channels + channel) * taps + tap];
            }
            write_panel_row(row, down * sizes.run() + across * sizes.channels + channel, rows,
                            memory);
          }
        }
      }};
}

}  // namespace flownpu::npu
