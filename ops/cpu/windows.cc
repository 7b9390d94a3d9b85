// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/windows.h"

#include "ops/error.h"

namespace flownpu::cpu {

SlidingWindows::SlidingWindows(const Node& node, const std::vector<std::int64_t>& kernel)
    : name_(to_string(node)),
      auto_pad_(node.text("auto_pad", "NOTSET")),
      ceils_(node.integer("ceil_mode", 0) != 0),
      axes_(kernel.size()) {
  if (axes_ < 1 || axes_ > kAxes)
    fail("[", name_, "] expected windows of 1 to ", kAxes, " axes, got ", axes_);
  const auto list = [&](std::string_view attribute, std::int64_t otherwise, std::size_t count) {
    std::vector<std::int64_t> given = node.integers(attribute);
    if (given.empty()) given.assign(count, otherwise);
    if (given.size() != count)
      fail("[", name_, "] expected ", count, " numbers in ", attribute, ", got ", given.size());
    return given;
  };
  const std::vector<std::int64_t> strides = list("strides", 1, axes_);
  const std::vector<std::int64_t> dilations = list("dilations", 1, axes_);
  const std::vector<std::int64_t> pads = list("pads", 0, 2 * axes_);
  for (std::size_t i = 0; i < axes_; ++i) {
    windows_[kAxes - axes_ + i] = {.kernel = kernel[i],
                                   .stride = strides[i],
                                   .dilation = dilations[i],
                                   .head = pads[i],
                                   .tail = pads[i + axes_]};
  }
}

SlidingWindows::Axes SlidingWindows::fitted(const Shape& images) const {
  if (images.rank() != rank())
    fail("[", name_, "] expected images of ", axes_, " axes after two others, got ",
         to_string(images));
  Axes windows = windows_;
  for (std::size_t i = kAxes - axes_; i < kAxes; ++i)
    fit(windows[i], images[static_cast<int>(i) - static_cast<int>(kAxes)]);
  return windows;
}

Shape SlidingWindows::result(const Shape& images, std::int64_t channels) const {
  const Axes windows = fitted(images);
  Shape shape = images;
  shape[1] = channels;
  for (std::size_t i = 0; i < axes_; ++i)
    shape[static_cast<int>(i) + 2] = windows[kAxes - axes_ + i].count;
  return shape;
}

void SlidingWindows::fit(Windows& axis, std::int64_t size) const {
  axis.size = size;
  if (auto_pad_.starts_with("SAME")) {
    axis.count = ceiling(size, axis.stride);
    const std::int64_t pads =
        std::max<std::int64_t>(0, (axis.count - 1) * axis.stride + axis.span() - size);
    axis.head = auto_pad_ == "SAME_LOWER" ? pads - pads / 2 : pads / 2;
    axis.tail = pads - axis.head;
    return;
  }
  if (auto_pad_ == "VALID") axis.head = axis.tail = 0;
  const std::int64_t room = axis.head + size + axis.tail - axis.span();
  // ONNX Runtime cuts a window that does not fit in.
  if (room < 0 || size == 0)
    unsupported("[", name_, "] expected images of at least one window of ", axis.span(), ", got ",
                size, ": give larger images, or set the provider option on_unsupported to cpu");
  axis.count = (ceils_ ? ceiling(room, axis.stride) : room / axis.stride) + 1;
  // No window begins behind the last pixel.
  if (ceils_ && axis.begin(axis.count - 1) >= size) --axis.count;
}

}  // namespace flownpu::cpu
