// SPDX-License-Identifier: Apache-2.0
// Windows that slide over images of one to three axes: those of pools and of convolutions.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ops/nodes/contract.h"
#include "ops/nodes/node.h"
#include "ops/nodes/tensor.h"

namespace flownpu::cpu {

// The smallest integer from a / b on.
inline std::int64_t ceiling(std::int64_t a, std::int64_t b) { return a / b + (a % b > 0 ? 1 : 0); }

// Indices [first, last) of a window's elements, or of windows.
struct Range {
  std::int64_t first = 0;
  std::int64_t last = 0;
  std::int64_t size() const { return std::max<std::int64_t>(last - first, 0); }
};

// Windows along one axis of `size` pixels: window i begins `i stride - head`, its elements are
// `dilation` apart.
struct Windows {
  std::int64_t kernel = 1;
  std::int64_t stride = 1;
  std::int64_t dilation = 1;
  std::int64_t head = 0;
  std::int64_t tail = 0;
  std::int64_t size = 1;
  std::int64_t count = 1;

  std::int64_t begin(std::int64_t window) const { return window * stride - head; }
  std::int64_t span() const { return (kernel - 1) * dilation + 1; }
  // Whether each window is one pixel, and all pixels have one.
  bool are_pixels() const { return kernel == 1 && stride == 1 && head == 0 && tail == 0; }
  // The elements of a window that are pixels; with pads, those that are pixels or pads.
  Range inside(std::int64_t window, bool pads) const {
    const std::int64_t at = begin(window);
    return {std::max<std::int64_t>(0, ceiling((pads ? -head : 0) - at, dilation)),
            std::min(kernel, ceiling(size + (pads ? tail : 0) - at, dilation))};
  }
  // The windows whose element `element` is a pixel.
  Range with_pixel(std::int64_t element) const {
    const std::int64_t at = element * dilation - head;
    return {std::max<std::int64_t>(0, ceiling(-at, stride)),
            std::min(count, ceiling(size - at, stride))};
  }
};

// The windows of a node over images [N, C, ..], from its attributes.
class SlidingWindows {
 public:
  // Images have at most so many axes; missing ones, the outermost, have one window of one pixel.
  static constexpr std::size_t kAxes = 3;
  using Axes = std::array<Windows, kAxes>;

  // Throws Error if there are other than 1 to 3 axes, or other than that many numbers in a list.
  SlidingWindows(const Node& node, const std::vector<std::int64_t>& kernel);

  // Axes of images, N and C included.
  int rank() const { return static_cast<int>(axes_) + 2; }
  // Before they are fitted to images, of the last rank() - 2 axes.
  const Axes& windows() const { return windows_; }
  bool has_explicit_pads() const { return auto_pad_ == "NOTSET"; }
  // Throws Error unless the images have as many axes as the windows, Unsupported if no window fits
  // in.
  Axes fitted(const Shape& images) const;
  // The shape of a result with a number for each window, and `channels` channels.
  Shape result(const Shape& images, std::int64_t channels) const;

 private:
  void fit(Windows& axis, std::int64_t size) const;

  std::string name_;
  std::string auto_pad_;
  bool ceils_;
  std::size_t axes_;
  Axes windows_{};
};

// Products of two such numbers fit in 64 bits.
inline constexpr std::int64_t kMostPixels = std::int64_t{1} << 31;
// The attributes that SlidingWindows reads and that pools and convolutions have.
inline constexpr AttributeRule kAutoPad = text("auto_pad", "NOTSET|VALID|SAME_UPPER|SAME_LOWER");
inline constexpr AttributeRule kDilations = integers("dilations", 1, kMostPixels);
inline constexpr AttributeRule kKernelShape = integers("kernel_shape", 1, kMostPixels);
inline constexpr AttributeRule kPads = integers("pads", 0, kMostPixels);
inline constexpr AttributeRule kStrides = integers("strides", 1, kMostPixels);

}  // namespace flownpu::cpu
