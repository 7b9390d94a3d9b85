// SPDX-License-Identifier: Apache-2.0
// Convolutions that the array computes by themselves: their sizes, and their filters as packed.
// aie/designs/convolution.py says how pictures lie in memory.
#pragma once

#include <cstdint>
#include <string_view>

#include "ops/nodes/node.h"
#include "ops/transformer/graph/fields.h"

namespace flownpu::npu {

// Conv, or ONNX Runtime's FusedConv, of the graph or on the array.
bool is_convolution(const Node& node);
// Whether it is one of pictures that the array's design takes: two axes, no groups or dilations,
// equal strides of 1 or 2, and an even number of channels.
bool takes_convolution(const Node& node);
// The node of the graph that was made one of the array's domain.
Node convolution_of_graph(Node node);

// The array's design (aie/designs/convolution.py), the host's layout of pictures and the packed
// filters all read these sizes.
struct ConvolutionSizes {
  static constexpr std::string_view kName = "convolution";
  // k_mt, and the columns of a column of tiles, of the array that sessions' programs have.
  static constexpr std::int64_t kRunUnit = 320;
  static constexpr std::int64_t kLeastFilters = 64;

  std::int64_t channels = 0;
  std::int64_t filters = 0;
  std::int64_t height = 0;
  std::int64_t width = 0;
  std::int64_t kernel_height = 3;
  std::int64_t kernel_width = 3;
  std::int64_t stride = 1;
  std::int64_t pad_top = 0;
  std::int64_t pad_left = 0;
  std::int64_t pad_bottom = 0;
  std::int64_t pad_right = 0;
  // No fields: each pixel is read so often along both axes; pictures, or 0 if they are not known
  // before a run.
  std::int64_t upsample = 1;
  std::int64_t batch = 0;

  bool operator==(const ConvolutionSizes&) const = default;

  // Those by which programs are found.
  template <typename Visit>
  static void fields(Visit&& visit) {
    using transformer::field;
    using Sizes = ConvolutionSizes;
    constexpr std::int64_t kMost = std::int64_t{1} << 20;
    visit(field("channels", &Sizes::channels, "of a pixel of the input, even", 1, kMost));
    visit(field("filters", &Sizes::filters, "channels of a pixel of the output", 1, kMost));
    visit(field("height", &Sizes::height, "lines of a picture, as read", 1, kMost));
    visit(field("width", &Sizes::width, "pixels of a line, as read", 1, kMost));
    visit(field("kernel_height", &Sizes::kernel_height, "taps, down", 1, kMost));
    visit(field("kernel_width", &Sizes::kernel_width, "taps, across", 1, kMost));
    visit(
        field("stride", &Sizes::stride, "pixels from window to window, down and across", 1, kMost));
    visit(field("pad_top", &Sizes::pad_top, "lines of zeros above a picture", 0, kMost));
    visit(field("pad_left", &Sizes::pad_left, "zeros before a line", 0, kMost));
    visit(field("pad_bottom", &Sizes::pad_bottom, "lines of zeros below a picture", 0, kMost));
    visit(field("pad_right", &Sizes::pad_right, "zeros behind a line", 0, kMost));
  }

  // The output's.
  std::int64_t lines() const {
    return (height + pad_top + pad_bottom - kernel_height) / stride + 1;
  }
  std::int64_t pixels() const { return (width + pad_left + pad_right - kernel_width) / stride + 1; }
  // Pixels from line to line, padding included: a multiple of the stride, so that pictures are
  // whole rows; lines from picture to picture; pixels before the first picture.
  std::int64_t line() const;
  std::int64_t padded_lines() const;
  std::int64_t head() const { return pad_top * line() + pad_left; }
  // Rows of the product from picture to picture.
  std::int64_t picture_rows() const { return padded_lines() * line() / stride; }
  // Rows of the product up to the last pixel of so many pictures.
  std::int64_t rows(std::int64_t pictures) const {
    return (pictures - 1) * picture_rows() + (lines() - 1) * line() + pixels();
  }
  // Rows of the weight for a line of taps, and its columns.
  std::int64_t run(std::int64_t k_mt = kRunUnit) const;
  std::int64_t padded_filters() const;
};

// Throws Error, which names the node, unless the pictures' size is known and the filters are an
// initializer in f32.
ConvolutionSizes sizes_of_convolution(const Node& node);
// The constant "weights": panels of [kernel_height][run][padded_filters] in bf16.
Packed pack_filters(const Node& node);

}  // namespace flownpu::npu
