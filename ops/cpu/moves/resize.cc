// SPDX-License-Identifier: Apache-2.0
// Resize of images: to the nearest pixel along any axes, or linear along the last two.
#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "ops/cpu/elements.h"
#include "ops/cpu/integers.h"
#include "ops/cpu/step.h"
#include "ops/cpu/widened.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

// The pixels that a pixel of the result lies between: x[first] (1 - weight) + x[second] weight.
struct Place {
  std::int64_t first = 0;
  std::int64_t second = 0;
  float weight = 0;
};

class Resize final : public Step {
 public:
  Resize(const Node& node, const Context& context)
      : context_(context),
        name_(to_string(node)),
        is_linear_(node.text("mode", "nearest") == "linear"),
        coordinates_(node.text("coordinate_transformation_mode", "half_pixel")),
        rounding_(node.text("nearest_mode", "round_prefer_floor")),
        axes_(node.integers("axes")) {
    if (is_linear_ && node.outputs[0].type != DataType::kFloat32)
      fail("[", name_, "] expected floats for a linear Resize");
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& x = inputs[0].shape;
    const bool by_sizes = is_given(inputs, 3) && inputs[3].shape.elements() > 0;
    const Tensor& given = inputs[by_sizes ? 3 : 2];
    const std::int64_t axes = axes_.empty() ? x.rank() : std::ssize(axes_);
    if (inputs.size() < 3 || given.shape.elements() != axes)
      fail("[", name_, "] expected a scale or a size for each of ", axes, " axes");
    axes_in(name_, axes_, x.rank());  // each once
    outputs[0] = x;
    for (int axis = 0; axis < x.rank(); ++axis) {
      const std::int64_t place = place_of(axis, x.rank());
      if (place < 0) continue;
      const float scale = by_sizes ? 1.0F : given.as<const float>()[place];
      // In float, as ONNX Runtime: 5 pixels times 1.4 are 7.
      const double size = by_sizes ? static_cast<double>(integer_at(given, place))
                                   : std::floor(static_cast<float>(x[axis]) * scale);
      if (!(scale > 0 && size >= 0 && size <= kMost))
        fail("[", name_, "] expected scales above 0 and sizes of 0 and more, got ", scale, " and ",
             size, " for axis ", axis);
      outputs[0][axis] = static_cast<std::int64_t>(size);
      const bool changes = outputs[0][axis] != x[axis] || scale != 1;
      if (is_linear_ && changes && axis + 2 < x.rank())
        unsupported("[", name_, "] expected a linear Resize along the last two axes only: set the ",
                    "provider option on_unsupported to cpu");
      if (x[axis] == 0 && outputs[0][axis] > 0)
        fail("[", name_, "] expected images of pixels, got ", to_string(x));
    }
    if (outputs[0].elements() > static_cast<std::int64_t>(kMost))
      fail("[", name_, "] expected a result that fits in memory, got ", to_string(outputs[0]));
  }

  std::size_t scratch_bytes(std::span<const Tensor> inputs) const override {
    std::array<Shape, 1> to;
    infer(inputs, to);
    std::int64_t places = 0;
    for (const std::int64_t size : to[0]) places += size;
    return static_cast<std::size_t>(places) * sizeof(Place);
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> scratch) const override {
    const Shape& x = inputs[0].shape;
    const Shape& y = outputs[0].shape;
    if (y.elements() == 0) return;
    std::array<const Place*, Shape::kMaxRank> places{};
    auto* next = reinterpret_cast<Place*>(scratch.data());
    for (int axis = 0; axis < y.rank(); ++axis) {
      places[static_cast<std::size_t>(axis)] = next;
      const double scale = scale_of(inputs, axis, x, y);
      for (std::int64_t at = 0; at < y[axis]; ++at) *next++ = place(at, scale, x[axis], y[axis]);
    }
    const Place* across = places[static_cast<std::size_t>(y.rank() - 1)];
    const std::int64_t width = y[-1];
    with_bytes(outputs[0].type, [&]<typename T> {
      context_.pool->run_rows(y.elements() / width, [&](std::int64_t row) {
        const auto [first, second, weight] = lines_of(row, x, y, places);
        const T* from = inputs[0].as<const T>() + first * x[-1];
        T* to = outputs[0].as<T>() + row * width;
        if (!is_linear_) {
          for (std::int64_t i = 0; i < width; ++i) to[i] = from[across[i].first];
          return;
        }
        mix(inputs[0].as<const float>() + first * x[-1],
            inputs[0].as<const float>() + second * x[-1], weight, across, width,
            outputs[0].as<float>() + row * width);
      });
    });
  }

 private:
  // More elements than a machine's memory holds, and few enough that sizes do not overflow.
  static constexpr double kMost = 1LL << 48;

  static void mix(const float* above, const float* below, float weight, const Place* across,
                  std::int64_t width, float* y) {
    for (std::int64_t i = 0; i < width; ++i) {
      const Place& at = across[i];
      // Not left + weight * (right - left), which is NaN beside an infinite pixel.
      const float left = above[at.first] * (1 - weight) + below[at.first] * weight;
      const float right = above[at.second] * (1 - weight) + below[at.second] * weight;
      y[i] = left * (1 - at.weight) + right * at.weight;
    }
  }

  // The place of an axis among those that have a scale or size; -1: it has none.
  std::int64_t place_of(int axis, int rank) const {
    if (axes_.empty()) return axis;
    const auto found = std::ranges::find_if(
        axes_, [&](std::int64_t one) { return (one < 0 ? one + rank : one) == axis; });
    return found == axes_.end() ? -1 : found - axes_.begin();
  }

  // Sizes that are given make the scale.
  double scale_of(std::span<const Tensor> inputs, int axis, const Shape& x, const Shape& y) const {
    const std::int64_t place = place_of(axis, x.rank());
    if (place < 0) return 1;
    if (!is_given(inputs, 3) || inputs[3].shape.elements() == 0)
      return inputs[2].as<const float>()[place];
    return static_cast<double>(y[axis]) / static_cast<double>(x[axis]);
  }

  Place place(std::int64_t at, double scale, std::int64_t size, std::int64_t result) const {
    const auto i = static_cast<double>(at);
    double x = (i + 0.5) / scale - 0.5;
    if (coordinates_ == "asymmetric") x = i / scale;
    if (coordinates_ == "pytorch_half_pixel" && result <= 1) x = 0;
    if (coordinates_ == "align_corners")
      x = result <= 1 ? 0 : i * static_cast<double>(size - 1) / static_cast<double>(result - 1);
    const auto last = static_cast<double>(size - 1);
    if (is_linear_) {
      x = std::clamp(x, 0.0, last);
      const auto first = static_cast<std::int64_t>(x);
      const auto weight = static_cast<float>(x - static_cast<double>(first));
      // A pixel alone, as two halves: 0 times an infinite neighbour is NaN.
      if (weight == 0) return {first, first, 0.5F};
      return {first, std::min(first + 1, size - 1), weight};
    }
    const auto nearest = static_cast<std::int64_t>(std::clamp(rounded(x), 0.0, last));
    return {nearest, nearest, 0};
  }

  double rounded(double x) const {
    if (rounding_ == "floor") return std::floor(x);
    if (rounding_ == "ceil") return std::ceil(x);
    return rounding_ == "round_prefer_ceil" ? std::floor(x + 0.5) : std::ceil(x - 0.5);
  }

  // The lines of x that a line of the result lies between.
  static Place lines_of(std::int64_t row, const Shape& x, const Shape& y,
                        const std::array<const Place*, Shape::kMaxRank>& places) {
    Place line{.weight = 0.5F};  // a vector has one line
    std::int64_t stride = 1;
    for (int axis = y.rank() - 2; axis >= 0; --axis) {
      const Place& at = places[static_cast<std::size_t>(axis)][row % y[axis]];
      line.first += at.first * stride;
      line.second += (axis == y.rank() - 2 ? at.second : at.first) * stride;
      if (axis == y.rank() - 2) line.weight = at.weight;
      row /= y[axis];
      stride *= x[axis];
    }
    return line;
  }

  Context context_;
  std::string name_;
  bool is_linear_;
  std::string coordinates_;
  std::string rounding_;
  std::vector<std::int64_t> axes_;
};

constexpr Port kInputs[] = {
    {.name = "X", .type_letter = 'T'},
    optional({.name = "roi", .types = {DataType::kFloat32, DataType::kFloat16}}),
    optional({.name = "scales", .types = kFloat, .shape = "[R]"}),
    optional({.name = "sizes", .types = kInt64, .shape = "[R]"})};
constexpr Port kOutputs[] = {{.name = "Y", .type_letter = 'T'}};
constexpr AttributeRule kAttributes[] = {
    only("antialias", 0),
    integers("axes"),
    text("coordinate_transformation_mode",
         "half_pixel|asymmetric|pytorch_half_pixel|align_corners"),
    number("cubic_coeff_a"),
    only("exclude_outside", 0),
    number("extrapolation_value"),
    text("keep_aspect_ratio_policy", "stretch"),
    text("mode", "nearest|linear"),
    text("nearest_mode", "round_prefer_floor|round_prefer_ceil|floor|ceil")};

constexpr Operator kOperators[] = {
    {{"", "Resize", 11, 19, kInputs, kOutputs, kAttributes}, make<Resize>}};

}  // namespace

std::span<const Operator> resize_operators() { return kOperators; }

}  // namespace flownpu::cpu
