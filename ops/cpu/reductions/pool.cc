// SPDX-License-Identifier: Apache-2.0
// AveragePool and MaxPool: windows that slide over images of one to three axes.
#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <type_traits>
#include <vector>

#include "ops/cpu/reductions/totals.h"
#include "ops/cpu/step.h"
#include "ops/cpu/widened.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

// The smallest integer from a / b on.
std::int64_t ceiling(std::int64_t a, std::int64_t b) { return a / b + (a % b > 0 ? 1 : 0); }

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

template <typename Function>
class Pool final : public Step {
 public:
  Pool(const Node& node, const Context& context)
      : context_(context),
        name_(to_string(node)),
        ceils_(node.integer("ceil_mode", 0) != 0),
        counts_pads_(node.integer("count_include_pad", 0) != 0),
        auto_pad_(node.text("auto_pad", "NOTSET")) {
    const std::vector<std::int64_t> kernel = node.integers("kernel_shape");
    axes_ = kernel.size();
    if (axes_ < 1 || axes_ > kAxes)
      fail("[", name_, "] expected windows of 1 to ", kAxes, " axes, got ", axes_);
    if (const Value* x = node.input(0); x->shape && x->shape->rank() != rank())
      fail("[", name_, "] expected images of ", axes_, " axes after two others, got ",
           to_string(*x->shape));
    const auto list = [&](std::string_view name, std::int64_t otherwise, std::size_t count) {
      std::vector<std::int64_t> given = node.integers(name);
      if (given.empty()) given.assign(count, otherwise);
      if (given.size() != count)
        fail("[", name_, "] expected ", count, " numbers in ", name, ", got ", given.size());
      return given;
    };
    const std::vector<std::int64_t> strides = list("strides", 1, axes_);
    const std::vector<std::int64_t> dilations = list("dilations", 1, axes_);
    const std::vector<std::int64_t> pads = list("pads", 0, 2 * axes_);
    for (std::size_t i = 0; i < axes_; ++i) {
      const bool pads_all = std::max(pads[i], pads[i + axes_]) >= kernel[i];
      if (auto_pad_ == "NOTSET" && pads_all)
        fail("[", name_, "] expected pads smaller than the window, got ",
             std::max(pads[i], pads[i + axes_]), " for ", kernel[i]);
      windows_[kAxes - axes_ + i] = {.kernel = kernel[i],
                                     .stride = strides[i],
                                     .dilation = dilations[i],
                                     .head = pads[i],
                                     .tail = pads[i + axes_]};
    }
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& x = inputs[0].shape;
    if (x.rank() != rank())
      fail("[", name_, "] expected images of ", axes_, " axes after two others, got ",
           to_string(x));
    outputs[0] = x;
    const auto windows = this->windows(x);
    for (std::size_t i = kAxes - axes_; i < kAxes; ++i)
      outputs[0][static_cast<int>(i) - static_cast<int>(kAxes)] = windows[i].count;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const Shape& x = inputs[0].shape;
    const auto [deep, down, across] = windows(x);
    const std::int64_t lines = deep.count * down.count;
    context_.pool->run_rows(x[0] * x[1] * lines, [&](std::int64_t row) {
      const std::int64_t z = row % lines / down.count;
      const std::int64_t y = row % down.count;
      const float* image =
          inputs[0].as<const float>() + row / lines * deep.size * down.size * across.size;
      float* to = outputs[0].as<float>() + row * across.count;
      for (std::int64_t first = 0; first < across.count; first += kColumns) {
        const Range columns{first, std::min(first + kColumns, across.count)};
        std::array<Total, kColumns> totals;
        totals.fill(Function::template start<float>());
        each_pixel(deep, z, [&](std::int64_t plane) {
          each_pixel(down, y, [&](std::int64_t line) {
            add_line(image + (plane * down.size + line) * across.size, across, columns, totals);
          });
        });
        const std::int64_t others =
            deep.inside(z, counts_pads_).size() * down.inside(y, counts_pads_).size();
        for (std::int64_t i = first; i < columns.last; ++i)
          to[i] = Function::template finish<float>(totals[static_cast<std::size_t>(i - first)],
                                                   others * across.inside(i, counts_pads_).size());
      }
    });
  }

 private:
  static constexpr std::size_t kAxes = 3;
  // Windows side by side that are added up together, on the stack.
  static constexpr std::int64_t kColumns = 256;
  using Total = typename Function::template Total<float>;

  int rank() const { return static_cast<int>(axes_) + 2; }

  // The windows of images [N, C, ..]; missing axes have one window of one pixel.
  std::array<Windows, kAxes> windows(const Shape& x) const {
    std::array<Windows, kAxes> windows = windows_;
    for (std::size_t i = kAxes - axes_; i < kAxes; ++i)
      fit(windows[i], x[static_cast<int>(i) - static_cast<int>(kAxes)]);
    return windows;
  }

  void fit(Windows& axis, std::int64_t size) const {
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

  // Calls work(place) for the pixels along an axis that a window has.
  template <typename Work>
  static void each_pixel(const Windows& axis, std::int64_t window, const Work& work) {
    const Range elements = axis.inside(window, false);
    for (std::int64_t i = elements.first; i < elements.last; ++i)
      work(axis.begin(window) + i * axis.dilation);
  }

  // Adds each window's pixels in a line to its total.
  static void add_line(const float* line, const Windows& across, const Range& columns,
                       std::array<Total, kColumns>& totals) {
    for (std::int64_t element = 0; element < across.kernel; ++element) {
      const Range range = across.with_pixel(element);
      const std::int64_t first = std::max(range.first, columns.first);
      const std::int64_t count = std::min(range.last, columns.last) - first;
      if (count <= 0) continue;
      const float* x = line + across.begin(first) + element * across.dilation;
      Total* total = totals.data() + (first - columns.first);
      const auto add = [&](auto stride) {
        for (std::int64_t i = 0; i < count; ++i)
          total[i] = Function::template add<float>(total[i], x[i * stride]);
      };
      if (across.stride == 1) {
        add(std::integral_constant<std::int64_t, 1>());
      } else {
        add(across.stride);
      }
    }
  }

  Context context_;
  std::string name_;
  bool ceils_;
  bool counts_pads_;
  std::string auto_pad_;
  std::size_t axes_ = 0;
  std::array<Windows, kAxes> windows_{};
};

constexpr Port kX[] = {{.name = "X", .types = kFloats, .type_letter = 'T'}};
constexpr Port kY[] = {{.name = "Y", .types = kFloats, .type_letter = 'T'}};
constexpr Port kLargest[] = {{.name = "Y", .types = kFloats, .type_letter = 'T'},
                             optional({.name = "Indices", .types = kNone})};
// Products of two such numbers fit in 64 bits.
constexpr std::int64_t kMost = std::int64_t{1} << 31;
constexpr AttributeRule kAutoPad = text("auto_pad", "NOTSET|VALID|SAME_UPPER|SAME_LOWER");
constexpr AttributeRule kAverage[] = {kAutoPad,
                                      flag("ceil_mode"),
                                      flag("count_include_pad"),
                                      integers("dilations", 1, kMost),
                                      integers("kernel_shape", 1, kMost),
                                      integers("pads", 0, kMost),
                                      integers("strides", 1, kMost)};
constexpr AttributeRule kMaximum[] = {kAutoPad, flag("ceil_mode"), integers("dilations", 1, kMost),
                                      integers("kernel_shape", 1, kMost),
                                      integers("pads", 0, kMost),
                                      // the order of Indices
                                      flag("storage_order"), integers("strides", 1, kMost)};

constexpr Operator kOperators[] = {
    {{"", "AveragePool", 7, 22, kX, kY, kAverage}, widened<make<Pool<Mean>>>},
    {{"", "MaxPool", 1, 22, kX, kLargest, kMaximum}, widened<make<Pool<Largest>>>},
};

}  // namespace

std::span<const Operator> pool_operators() { return kOperators; }

}  // namespace flownpu::cpu
