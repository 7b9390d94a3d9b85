// SPDX-License-Identifier: Apache-2.0
// Convolutions that the array computes by themselves: their sizes, and their filters as packed.
// aie/designs/convolution.py says how pictures lie in memory.
#pragma once

#include <cstdint>
#include <functional>

#include "ops/nodes/node.h"

namespace flownpu::npu {

// Conv, or ONNX Runtime's FusedConv, of the graph or on the array.
bool is_convolution(const Node& node);
// Whether it is one of pictures that the array's design takes: two axes, no groups or dilations,
// equal strides of 1 or 2, and an even number of channels.
bool takes_convolution(const Node& node);
// The node of the graph that was made one of the array's domain.
Node convolution_of_graph(Node node);

struct ConvolutionSizes {
  std::int64_t channels = 0;
  std::int64_t filters = 0;
  std::int64_t height = 0;  // as read: with `upsample` twice the picture's
  std::int64_t width = 0;
  std::int64_t kernel_height = 0;
  std::int64_t kernel_width = 0;
  std::int64_t stride = 1;
  std::int64_t pad_top = 0;
  std::int64_t pad_left = 0;
  std::int64_t pad_bottom = 0;
  std::int64_t pad_right = 0;
  std::int64_t upsample = 1;  // each pixel is read so often along both axes
  std::int64_t batch = 0;     // 0: not known before a run

  // The output's.
  std::int64_t lines() const {
    return (height + pad_top + pad_bottom - kernel_height) / stride + 1;
  }
  std::int64_t pixels() const { return (width + pad_left + pad_right - kernel_width) / stride + 1; }
  // Pixels from line to line, lines from picture to picture, pixels before the first picture.
  std::int64_t line() const;
  std::int64_t padded_lines() const;
  std::int64_t head() const { return pad_top * line() + pad_left; }
  // Rows of the product from picture to picture.
  std::int64_t picture_rows() const { return padded_lines() * line() / stride; }
  // Rows of the weight for a line of taps, and its columns.
  std::int64_t run() const;
  std::int64_t padded_filters() const;
};

// Throws Error, which names the node, unless the pictures' size is known and the filters are an
// initializer in f32.
ConvolutionSizes sizes_of_convolution(const Node& node);
// Calls `visit(name, size)` for the sizes by which programs are found.
void each_size(const ConvolutionSizes& sizes,
               const std::function<void(const char*, std::int64_t)>& visit);

// The constant "weights": panels of [kernel_height][run][padded_filters] in bf16.
Packed pack_filters(const Node& node);

}  // namespace flownpu::npu
