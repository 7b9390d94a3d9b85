// SPDX-License-Identifier: Apache-2.0
// Conv and FusedConv over images of one to three axes.
//
// Implicit GEMM: an image becomes channels-last, [pixels][C], once, in the type of the product
// (bf16 if the instruction set has dot products of it, else f32). The windows of some thousand
// pixels are copied from it, a row [taps][C] each, which the packed weight [taps C][M] multiplies;
// the epilogue writes [M][pixels]. Copying a row costs a hundredth of multiplying it by some
// hundred columns. Windows of 3 x 3 neighbouring pixels of many channels are Winograd's
// (winograd.h), and so are those of images that are read twice as large (attribute `upsample`,
// which only the rule `convolution` sets: each pixel is repeated along both axes).
//
// Few channels of the result (the picture's own, or one of each group) would fill few of a block's
// 32 columns: these are sums of shifted lines, in f32.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "ops/cpu/images/channels_last.h"
#include "ops/cpu/images/winograd.h"
#include "ops/cpu/integers.h"
#include "ops/cpu/plane.h"
#include "ops/cpu/products/dense_matmul.h"
#include "ops/cpu/products/q4nx_matmul_plan.h"
#include "ops/cpu/rows.h"
#include "ops/cpu/widened.h"
#include "ops/cpu/windows.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

// Up to so many channels of the result in a group are summed up line by line: 8 of 32 columns at
// twice the products a cycle that shifted lines reach with their loads and stores.
constexpr std::int64_t kFewChannels = 8;
// Up to so many channels are not rounded. Up to 4 are a picture's or latent's own numbers: they
// take a hundredth of a model's time, and all that follows inherits their error. With 16, bf16 took
// 1.5 times ONNX Runtime's time in f32 on Zen 4: rounding gains nothing there.
constexpr std::int64_t kUnroundedChannels = 16;
// Rows that are copied at once, in bytes: they stay in a third-level cache, and a weight of 1280 x
// 11520 in bf16 (29 MB) is read once for each 180 of them, 11 ms of multiplying on two cores.
constexpr std::int64_t kGatheredBytes = 4 << 20;

enum Input : std::uint8_t { kX, kW, kB, kZ };

class Convolution final : public Step {
 public:
  Convolution(const Node& node, const Context& context)
      : context_(context),
        name_(to_string(node)),
        windows_(node, kernel_of(node)),
        groups_(node.integer("group", 1)),
        upsample_(node.integer("upsample", 1)),
        activation_(node.text("activation", "") == "Relu" ? Function::kRelu : Function::kNone) {
    const Value& weight = *node.input(kW);
    const Shape shape = weight.shape.value_or(Shape());  // kernel_of() checked it
    m_ = shape[0];
    channels_ = shape[1];
    for (const Windows& axis : windows_.windows()) taps_ *= axis.kernel;
    if (m_ % groups_ != 0)
      fail("[", name_, "] expected a weight for each of ", groups_, " groups, got ",
           to_string(shape));
    for (const Input input : {kX, kB}) {
      const Value* value = node.input(input);
      if (value != nullptr && value->shape) check(input, *value->shape);
    }
    if (is_upsampled() && !Winograd::takes_upsampled(windows_))
      fail("[", name_, "] expected 3 x 3 taps and pads of 1 with upsample = 2");
    const bool is_winograd = is_upsampled() || Winograd::takes(windows_, channels_, group_m());
    if (group_m() <= kFewChannels && !is_upsampled()) keep_lines(weight);
    for (std::int64_t group = 0; lines_.empty() && group < groups_; ++group) {
      if (is_winograd) {
        keep_winograd(weight, group);
      } else {
        keep_product(weight, group);
      }
    }
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    check(kX, inputs[kX].shape);
    if (is_given(inputs, kB)) check(kB, inputs[kB].shape);
    outputs[0] = windows_.result(as_read(inputs[kX].shape), m_);
    if (is_given(inputs, kZ) && !(inputs[kZ].shape == outputs[0]))
      fail("[", name_, "] expected Z of shape ", to_string(outputs[0]), ", got ",
           to_string(inputs[kZ].shape));
  }

  std::size_t scratch_bytes(std::span<const Tensor> inputs) const override {
    Scratch scratch;
    if (!winograd_.empty()) return winograd_[0].scratch_bytes(winograd_images(inputs));
    if (!products_.empty()) Images(*this, inputs, scratch);
    return scratch.bytes();
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> memory) const override {
    const auto given = [&](Input input) {
      return is_given(inputs, input) ? inputs[input].as<const float>() : nullptr;
    };
    if (!lines_.empty()) return add_lines(inputs, given(kB), given(kZ), outputs[0]);
    const std::int64_t plane = elements_of(outputs[0].shape, 2, outputs[0].shape.rank());
    const auto epilogue_of = [&](std::int64_t group) {
      const std::int64_t first = group * group_m();
      ProductEpilogue epilogue;
      if (const float* bias = given(kB)) epilogue.bias = bias + first;
      epilogue.activation = activation_;
      epilogue.m = group_m();
      epilogue.plane = plane;
      epilogue.image_channels = m_;
      epilogue.y = outputs[0].as<float>() + first * plane;
      if (const float* z = given(kZ)) epilogue.residual = z + first * plane;
      return epilogue;
    };
    if (outputs[0].shape.elements() == 0) return;
    for (std::size_t group = 0; group < winograd_.size(); ++group) {
      Winograd::Images images = winograd_images(inputs);
      images.x += static_cast<std::int64_t>(group) * images.stride / groups_;
      winograd_[group].run(images, epilogue_of(static_cast<std::int64_t>(group)), memory.data());
    }
    if (!winograd_.empty()) return;
    Scratch scratch(memory.data());
    const Images images(*this, inputs, scratch);
    const std::int64_t rows = inputs[kX].shape[0] * images.plane;
    for (std::int64_t group = 0; group < groups_; ++group) {
      ProductEpilogue epilogue = epilogue_of(group);
      turn_channels_last(
          context_,
          {given(kX) + group * channels_ * images.pixels, inputs[kX].shape[0],
           channels_ * groups_ * images.pixels, channels_, images.pixels, 0, images.pixels},
          images.element == 2 ? DataType::kBFloat16 : DataType::kFloat32, images.turned);
      const DenseProduct& product = products_[static_cast<std::size_t>(group)];
      for (std::int64_t part = 0; part < images.parts; ++part) {
        const auto [begin, end] = cpu::part(rows, images.parts, part);
        if (images.gathered != nullptr) gather(images, begin, end);
        epilogue.first_pixel = begin;
        product.run_rounded(images.windows, end - begin, epilogue);
      }
    }
  }

  std::int64_t multiply_adds() const override { return m_ * k(); }

 private:
  // The images of a call, channels-last, and memory for windows.
  struct Images {
    Images(const Convolution& step, std::span<const Tensor> inputs, Scratch& scratch)
        : axes(step.windows_.fitted(inputs[kX].shape)) {
      for (const Windows& axis : axes) {
        pixels *= axis.size;
        plane *= axis.count;
      }
      const std::int64_t count = inputs[kX].shape[0];
      element = step.products_[0].element_bytes();
      turned = scratch.take<std::byte>(count * pixels * step.channels_ * element);
      windows = step.products_[0].rows_of(step.k());
      windows.values = turned;
      const bool are_pixels = std::ranges::all_of(axes, &Windows::are_pixels);
      if (are_pixels && windows.padded_k == step.k()) return;
      const std::int64_t most = std::max<std::int64_t>(
          kLeastRows, kGatheredBytes / std::max<std::int64_t>(windows.padded_k * element, 1));
      parts = std::max<std::int64_t>(1, q4nx::ceil_div(count * plane, most));
      gathered = scratch.take<std::byte>(q4nx::ceil_div(count * plane, parts) * windows.padded_k *
                                         element);
      windows.values = gathered;
    }

    static constexpr std::int64_t kLeastRows = kTaskRows;

    SlidingWindows::Axes axes;
    std::int64_t pixels = 1;
    // Pixels of a channel of the result.
    std::int64_t plane = 1;
    std::int64_t element = 0;
    std::byte* turned = nullptr;
    // The rows of all windows are copied in so many parts; null: the pixels are the rows.
    std::int64_t parts = 1;
    std::byte* gathered = nullptr;
    RoundedActivations windows;
  };

  static std::vector<std::int64_t> kernel_of(const Node& node) {
    const Value* weight = node.input(kW);
    if (!weight->shape || weight->shape->rank() < 3 || weight->shape->elements() <= 0)
      fail("[", to_string(node), "] expected a weight [M, C / group, ..] of known shape, got ",
           weight->shape ? to_string(*weight->shape) : "none");
    std::vector<std::int64_t> kernel(weight->shape->begin() + 2, weight->shape->end());
    if (const std::vector<std::int64_t> given = node.integers("kernel_shape");
        !given.empty() && given != kernel) {
      fail("[", to_string(node), "] expected kernel_shape to be that of the weight, ",
           to_string(*weight->shape));
    }
    return kernel;
  }

  bool is_upsampled() const { return upsample_ == 2; }
  // The shape in which images are read.
  Shape as_read(Shape images) const {
    for (int axis = 2; is_upsampled() && axis < images.rank(); ++axis) images[axis] *= upsample_;
    return images;
  }

  std::int64_t group_m() const { return m_ / groups_; }
  std::int64_t k() const { return channels_ * taps_; }

  // Throws Error unless the shape of X, or of B, fits the weight; unknown sizes are -1.
  void check(Input input, const Shape& shape) const {
    const std::int64_t expected = input == kX ? channels_ * groups_ : m_;
    const bool has_axes = input == kX ? shape.rank() == windows_.rank() : shape.rank() == 1;
    const std::int64_t got = !has_axes ? 0 : shape[input == kX ? 1 : 0];
    if (got == expected || got < 0) return;
    if (input == kB)
      fail("[", name_, "] expected a bias of shape [", expected, "], got ", to_string(shape));
    fail("[", name_, "] expected images of ", expected, " channels and ", windows_.rank() - 2,
         " axes after two others, got ", to_string(shape));
  }

  Winograd::Images winograd_images(std::span<const Tensor> inputs) const {
    const Shape& shape = inputs[kX].shape;
    auto [deep, down, across] = windows_.fitted(as_read(shape));
    down.size = shape[2];
    across.size = shape[3];
    return {inputs[kX].as<const float>(), shape[0], elements_of(shape, 1, shape.rank()), down,
            across};
  }

  void keep_winograd(const Value& weight, std::int64_t group) {
    const std::int64_t bytes =
        group * group_m() * k() * static_cast<std::int64_t>(size_of(weight.type));
    const auto form = is_upsampled() ? Winograd::Form::kUpsampled : Winograd::Form::kAsTheyAre;
    winograd_.emplace_back(context_, form, channels_, group_m())
        .keep(static_cast<const std::byte*>(weight.constant) + bytes, weight.type);
  }

  // The weight [M][C][taps] of a group as [M][taps][C].
  void keep_product(const Value& weight, std::int64_t group) {
    DenseProduct product(context_);
    if (channels_ > kUnroundedChannels) product.round_to_bf16();
    const std::size_t bytes = size_of(weight.type);
    std::vector<std::byte> turned(static_cast<std::size_t>(group_m() * k()) * bytes);
    const auto turn_rows = [&](auto element) {
      using Element = decltype(element);
      const auto* from = static_cast<const Element*>(weight.constant) + group * group_m() * k();
      auto* to = reinterpret_cast<Element*>(turned.data());
      context_.pool->run_rows(group_m(), [&](std::int64_t row) {
        transpose(from + row * k(), taps_, to + row * k(), channels_, taps_, channels_);
      });
    };
    if (bytes == sizeof(float)) {
      turn_rows(float{});
    } else {
      turn_rows(std::uint16_t{});
    }
    product.keep({turned.data(), weight.type, k(), group_m(), true, nullptr});
    products_.push_back(std::move(product));
  }

  void keep_lines(const Value& weight) {
    lines_.resize(static_cast<std::size_t>(m_ * k()));
    if (weight.type == DataType::kFloat32) {
      std::copy_n(static_cast<const float*>(weight.constant), m_ * k(), lines_.data());
    } else {
      context_.kernels.widen(weight.constant, weight.type, lines_.data(), m_ * k());
    }
  }

  // Copies the windows [begin, end), counted over all images.
  void gather(const Images& images, std::int64_t begin, std::int64_t end) const {
    const std::int64_t row_bytes = images.windows.padded_k * images.element;
    const std::int64_t tap = channels_ * images.element;
    const auto& [deep, down, across] = images.axes;
    context_.pool->run_rows(end - begin, [&](std::int64_t row) {
      const std::int64_t window = begin + row;
      const std::int64_t x = window % across.count;
      const std::int64_t y = window / across.count % down.count;
      const std::int64_t z = window / across.count / down.count % deep.count;
      const std::byte* image = images.turned + window / images.plane * images.pixels * tap;
      std::byte* to = images.gathered + row * row_bytes;
      std::byte* const last = to + row_bytes;
      const Range columns = across.inside(x, false);
      const auto clear = [&to, tap](std::int64_t taps) {
        std::memset(to, 0, static_cast<std::size_t>(taps * tap));
        to += taps * tap;
      };
      for (std::int64_t i = 0; i < deep.kernel; ++i) {
        for (std::int64_t j = 0; j < down.kernel; ++j) {
          const std::int64_t plane = deep.begin(z) + i * deep.dilation;
          const std::int64_t line = down.begin(y) + j * down.dilation;
          const bool is_inside = plane >= 0 && plane < deep.size && line >= 0 && line < down.size;
          if (!is_inside || columns.size() == 0) {
            clear(across.kernel);
            continue;
          }
          clear(columns.first);
          const std::byte* from = image + ((plane * down.size + line) * across.size +
                                           across.begin(x) + columns.first * across.dilation) *
                                              tap;
          const std::int64_t together = across.dilation == 1 ? columns.size() : 1;
          for (std::int64_t at = 0; at < columns.size(); at += together) {
            std::memcpy(to, from + at * across.dilation * tap,
                        static_cast<std::size_t>(together * tap));
            to += together * tap;
          }
          clear(across.kernel - columns.last);
        }
      }
      std::memset(to, 0, static_cast<std::size_t>(last - to));
    });
  }

  // Each line of the result is a sum of shifted lines of the images.
  void add_lines(std::span<const Tensor> inputs, const float* bias, const float* z,
                 const Tensor& result) const {
    const SlidingWindows::Axes axes = windows_.fitted(inputs[kX].shape);
    const auto& [deep, down, across] = axes;
    const std::int64_t lines = deep.count * down.count;
    const std::int64_t pixels = deep.size * down.size * across.size;
    context_.pool->run_rows(inputs[kX].shape[0] * m_ * lines, [&](std::int64_t row) {
      const std::int64_t m = row / lines % m_;
      const std::int64_t first_channel =
          row / lines / m_ * channels_ * groups_ + m / group_m() * channels_;
      const float* images = inputs[kX].as<const float>() + first_channel * pixels;
      const float* weight = lines_.data() + m * k();
      float* y = result.as<float>() + row * across.count;
      std::fill_n(y, across.count, bias == nullptr ? 0.0F : bias[m]);
      for (std::int64_t c = 0; c < channels_; ++c) {
        for (std::int64_t i = 0; i < deep.kernel; ++i) {
          for (std::int64_t j = 0; j < down.kernel; ++j, weight += across.kernel) {
            const std::int64_t plane = deep.begin(row % lines / down.count) + i * deep.dilation;
            const std::int64_t line = down.begin(row % down.count) + j * down.dilation;
            if (plane < 0 || plane >= deep.size || line < 0 || line >= down.size) continue;
            const std::int64_t at = (c * deep.size + plane) * down.size + line;
            add_line(images + at * across.size, across, weight, y);
          }
        }
      }
      if (z != nullptr) context_.kernels.add(y, z + row * across.count, y, across.count);
      if (activation_ != Function::kNone) context_.kernels.apply(activation_, y, y, across.count);
    });
  }

  void add_line(const float* x, const Windows& across, const float* weight, float* y) const {
    for (std::int64_t element = 0; element < across.kernel; ++element) {
      const Range range = across.with_pixel(element);
      if (range.size() == 0) continue;
      const float* from = x + across.begin(range.first) + element * across.dilation;
      if (across.stride == 1) {
        context_.kernels.add_scaled(from, weight[element], y + range.first, range.size());
        continue;
      }
      for (std::int64_t i = 0; i < range.size(); ++i)
        y[range.first + i] += weight[element] * from[i * across.stride];
    }
  }

  Context context_;
  std::string name_;
  SlidingWindows windows_;
  std::int64_t groups_;
  std::int64_t upsample_;
  Function activation_;
  std::int64_t m_ = 0;
  // Channels of a group of the images.
  std::int64_t channels_ = 0;
  std::int64_t taps_ = 1;
  // One of either for each group; none where lines are summed up.
  std::vector<Winograd> winograd_;
  std::vector<DenseProduct> products_;
  // The weight [M][C][taps], where lines are summed up.
  std::vector<float> lines_;
};

constexpr Port kConv[] = {{.name = "X", .types = kFloats, .type_letter = 'T'},
                          {.name = "W", .types = kFloats, .type_letter = 'T', .constant = true},
                          optional({.name = "B", .types = kFloats, .type_letter = 'T'})};
constexpr Types kFusedTypes{DataType::kFloat32, DataType::kFloat16};
constexpr Port kFusedConv[] = {
    {.name = "X", .types = kFusedTypes, .type_letter = 'T'},
    {.name = "W", .types = kFusedTypes, .type_letter = 'T', .constant = true},
    optional({.name = "B", .types = kFusedTypes, .type_letter = 'T'}),
    optional({.name = "Z", .types = kFusedTypes, .type_letter = 'T'})};
constexpr Port kY[] = {{.name = "Y", .types = kFloats, .type_letter = 'T'}};
constexpr Port kFusedY[] = {{.name = "Y", .types = kFusedTypes, .type_letter = 'T'}};
constexpr AttributeRule kFusedAttributes[] = {
    kAutoPad, kDilations, count("group", 1),          kKernelShape,
    kPads,    kStrides,   text("activation", "Relu"), integer("upsample", 1, 2)};
constexpr std::span kAttributes =
    std::span(kFusedAttributes).first(std::size(kFusedAttributes) - 2);
constexpr Operator kOperators[] = {
    {{"", "Conv", 1, 22, kConv, kY, kAttributes}, widened<make<Convolution>, kW>},
    {{"com.microsoft", "FusedConv", 1, 1, kFusedConv, kFusedY, kFusedAttributes},
     widened<make<Convolution>, kW>},
};

}  // namespace

std::span<const Operator> convolution_operators() { return kOperators; }

}  // namespace flownpu::cpu
