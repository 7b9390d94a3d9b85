// SPDX-License-Identifier: Apache-2.0
// Windows that do not overlap, as encoders of images cut them. The patch embedding is a convolution
// whose stride is its kernel, so it is a matrix product of the patches.
#include <algorithm>
#include <string>
#include <vector>

#include "ops/cpu/broadcast.h"
#include "ops/cpu/products/dense_matmul.h"
#include "ops/cpu/widened.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

// Height and width of a window of images [N, C, H, W].
struct Window {
  std::int64_t height;
  std::int64_t width;

  // Windows below and beside one another; pixels that fill none are left out.
  std::int64_t rows(const Shape& images) const { return images[2] / height; }
  std::int64_t columns(const Shape& images) const { return images[3] / width; }

  // Throws Unsupported if no window fits in: ONNX Runtime's Conv fails.
  void expect_one(const std::string& name, const Shape& images) const {
    if (images[2] >= height && images[3] >= width) return;
    unsupported("[", name, "] expected images of at least one window of ", height, " x ", width,
                ", got ", to_string(images), ": give larger images, or set the provider option ",
                "on_unsupported to cpu");
  }
};

// The window of a node that cuts images into windows side by side; throws Error for others.
Window window_of(const Node& node, std::vector<std::int64_t> kernel) {
  std::vector<std::int64_t> strides = node.integers("strides");
  if (strides.empty()) strides.assign(kernel.size(), 1);
  if (kernel.size() != 2 || strides != kernel) {
    fail("[", to_string(node),
         "] expected windows of two axes side by side: strides = kernel_shape");
  }
  if (kernel[0] <= 0 || kernel[1] <= 0)
    fail("[", to_string(node), "] expected windows of 1 x 1 and more, got ", kernel[0], " x ",
         kernel[1]);
  return {kernel[0], kernel[1]};
}

class PatchConv final : public Step {
 public:
  // Pixels are not rounded: the product takes a thousandth of an encoder's time.
  PatchConv(const Node& node, const Context& context)
      : context_(context), name_(to_string(node)), product_(context) {
    const Value* weight = node.input(1);
    if (!weight->shape) fail("[", name_, "] expected a weight of known shape");
    const Shape& shape = *weight->shape;
    window_ = window_of(node, {shape[2], shape[3]});
    if (const std::vector<std::int64_t> given = node.integers("kernel_shape");
        !given.empty() && given != std::vector{shape[2], shape[3]}) {
      fail("[", name_, "] expected kernel_shape to be the weight's, ", shape[2], " x ", shape[3]);
    }
    channels_ = shape[1];
    m_ = shape[0];
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& images = inputs[0].shape;
    window_.expect_one(name_, images);
    outputs[0] = Shape{images[0], m_, window_.rows(images), window_.columns(images)};
  }

  std::size_t scratch_bytes(std::span<const Tensor> inputs) const override {
    const Shape& images = inputs[0].shape;
    const std::int64_t count = window_.rows(images) * window_.columns(images);
    Scratch scratch;
    if (!is_pixel()) scratch.take<float>(k() * count);
    return scratch.bytes() + product_.scratch_bytes(m_, k(), count);
  }

  // Y [M][count] = W [M][K] times the patches of an image as columns [K][count]: in this order a
  // convolution of single pixels needs no copy, and its result none either.
  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> memory) const override {
    const Shape& images = inputs[0].shape;
    const std::int64_t count = window_.rows(images) * window_.columns(images);
    Scratch scratch(memory.data());
    auto* gathered = is_pixel() ? nullptr : scratch.take<float>(k() * count);
    // Image by image, so that memory for one suffices.
    for (std::int64_t n = 0; n < images[0]; ++n) {
      const float* image = inputs[0].as<const float>() + n * channels_ * images[2] * images[3];
      if (!is_pixel()) gather(image, images, gathered);
      const DenseWeight columns{
          is_pixel() ? image : gathered, DataType::kFloat32, k(), count, false, nullptr};
      ProductEpilogue epilogue;
      epilogue.y = outputs[0].as<float>() + n * m_ * count;
      epilogue.m = count;
      product_.run(inputs[1].as<const float>(), m_, columns, epilogue,
                   memory.data() + scratch.bytes());
      if (inputs.size() > 2 && inputs[2].present())
        add_bias(inputs[2].as<const float>(), count, epilogue.y);
    }
  }

  std::int64_t multiply_adds() const override { return m_ * k(); }

 private:
  std::int64_t k() const { return channels_ * window_.height * window_.width; }
  bool is_pixel() const { return window_.height == 1 && window_.width == 1; }

  // The rows of the columns are in the order of the weight: [channel][row][column].
  void gather(const float* image, const Shape& images, float* columns) const {
    const std::int64_t down = window_.rows(images);
    const std::int64_t across = window_.columns(images);
    context_.pool->run(k(), [&](std::int64_t row) {
      const std::int64_t x = row % window_.width;
      const std::int64_t y = row / window_.width % window_.height;
      const std::int64_t channel = row / window_.width / window_.height;
      float* to = columns + row * down * across;
      for (std::int64_t window = 0; window < down; ++window) {
        const std::int64_t line = channel * images[2] + window * window_.height + y;
        const float* from = image + line * images[3] + x;
        for (std::int64_t i = 0; i < across; ++i) *to++ = from[i * window_.width];
      }
    });
  }

  void add_bias(const float* bias, std::int64_t count, float* y) const {
    in_parallel(*context_.pool, m_ * count, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end;) {
        const std::int64_t stop = std::min((i / count + 1) * count, end);
        const float value = bias[i / count];
        for (; i < stop; ++i) y[i] += value;
      }
    });
  }

  Context context_;
  std::string name_;
  DenseProduct product_;
  Window window_{};
  std::int64_t channels_ = 0;
  std::int64_t m_ = 0;
};

constexpr Port kConv[] = {
    {.name = "X", .types = kFloats, .shape = "[N,C,?,?]", .type_letter = 'T'},
    {.name = "W", .types = kFloats, .shape = "[M,C,?,?]", .type_letter = 'T', .constant = true},
    optional({.name = "B", .types = kFloats, .shape = "[M]", .type_letter = 'T'})};
constexpr Port kY[] = {{.name = "Y", .types = kFloats, .type_letter = 'T'}};
constexpr AttributeRule kConvAttributes[] = {
    text("auto_pad", "NOTSET|VALID"), integers("dilations", 1, 1), only("group", 1),
    integers("kernel_shape", 1),      integers("pads", 0, 0),      integers("strides", 1)};
constexpr Operator kOperators[] = {
    {{"", "Conv", 1, 22, kConv, kY, kConvAttributes}, widened<make<PatchConv>>},
};

}  // namespace

std::span<const Operator> patch_operators() { return kOperators; }

}  // namespace flownpu::cpu
