// SPDX-License-Identifier: Apache-2.0
// Operators that move elements: one view of the input becomes one of the output.
#include <algorithm>
#include <cmath>
#include <string>

#include "ops/cpu/integers.h"
#include "ops/error.h"
#include "ops/gpu/operators/views.h"

namespace flownpu::gpu {
namespace {

std::size_t index(std::int64_t axis) { return static_cast<std::size_t>(axis); }

class Move final : public ViewStep {
 public:
  Move(const Node& node, StepArguments arguments)
      : ViewStep(node, std::move(arguments), "a", 1),
        op_type_(node.op_type),
        axis_(node.integer("axis", 0)),
        permutation_(node.integers("perm")) {}

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    Run run(context());
    std::vector<const Buffer*> written;
    for (const Tensor& output : outputs)
      written.push_back(output.data == nullptr ? nullptr : run.output(output));
    if (op_type_ == "Concat") {
      join(run, inputs, outputs[0], written[0]);
    } else if (op_type_ == "Split") {
      split(run, inputs, outputs, written);
    } else if (written[0] != nullptr) {
      const auto [sizes, view] = source(inputs, outputs[0].shape);
      walk(run, sizes, {{at(run, inputs, 0), view}}, {written[0], view_of(sizes)});
    }
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (written[i] != nullptr) run.read(written[i], outputs[i]);
    }
  }

 private:
  void join(Run& run, std::span<const Tensor> inputs, const Tensor& y,
            const Buffer* written) const {
    if (written == nullptr) return;
    const std::int64_t axis = cpu::wrap(name(), axis_, y.shape.rank());
    View part = view_of(y.shape);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const Shape& sizes = inputs[i].shape;
      if (sizes.elements() > 0)
        walk(run, sizes, {{at(run, inputs, i), view_of(sizes)}}, {written, part});
      part.offset += sizes[static_cast<int>(axis)] * part.steps[index(axis)];
    }
  }

  void split(Run& run, std::span<const Tensor> inputs, std::span<const Tensor> outputs,
             const std::vector<const Buffer*>& written) const {
    const std::int64_t axis = cpu::wrap(name(), axis_, inputs[0].shape.rank());
    View part = view_of(inputs[0].shape);
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const Shape& sizes = outputs[i].shape;
      if (written[i] != nullptr)
        walk(run, sizes, {{at(run, inputs, 0), part}}, {written[i], view_of(sizes)});
      part.offset += sizes[static_cast<int>(axis)] * part.steps[index(axis)];
    }
  }

  // Sizes of a walk in the order of the output's elements, and the view of the input that it takes.
  std::pair<Shape, View> source(std::span<const Tensor> inputs, const Shape& y) const {
    const Shape& x = inputs[0].shape;
    const View own = view_of(x);
    if (op_type_ == "Transpose") return {y, transposed(x, own)};
    if (op_type_ == "Slice") return {y, sliced(inputs, own)};
    if (op_type_ == "Resize" || op_type_ == "Expand") return repeated(x, y, own);
    return {x, own};  // the same elements in another shape, or type
  }

  View transposed(const Shape& x, const View& own) const {
    View view;
    for (int axis = 0; axis < x.rank(); ++axis) {
      const std::int64_t from =
          permutation_.empty() ? x.rank() - 1 - axis : permutation_[index(axis)];
      view.steps[index(axis)] = own.steps[index(from)];
    }
    return view;
  }

  View sliced(std::span<const Tensor> inputs, const View& own) const {
    const Shape& x = inputs[0].shape;
    View view = own;
    for (std::int64_t i = 0; i < inputs[1].shape.elements(); ++i) {
      const std::int64_t axis =
          cpu::wrap(name(), cpu::is_given(inputs, 3) ? cpu::integer_at(inputs[3], i) : i, x.rank());
      const std::int64_t size = x[static_cast<int>(axis)];
      const std::int64_t start = cpu::integer_at(inputs[1], i);
      const std::int64_t first = std::clamp<std::int64_t>(start < 0 ? start + size : start, 0,
                                                          std::max<std::int64_t>(size - 1, 0));
      view.offset += first * own.steps[index(axis)];
      if (cpu::is_given(inputs, 4)) view.steps[index(axis)] *= cpu::integer_at(inputs[4], i);
    }
    return view;
  }

  // Each axis of x and its repetitions: behind it for Resize, which repeats pixels, before it for
  // Expand.
  std::pair<Shape, View> repeated(const Shape& x, const Shape& y, const View& own) const {
    Shape sizes;
    View view;
    const int front = y.rank() - x.rank();
    const bool is_resize = op_type_ == "Resize";
    for (int axis = 0; axis < y.rank(); ++axis) {
      const std::int64_t size = axis < front ? 1 : x[axis - front];
      if (size == 0 || y[axis] % size != 0)
        unsupported("[", name(), "] expected sizes that are multiples of those of ", to_string(x),
                    " on device 'gpu', got ", to_string(y), ": use device = cpu");
      const std::int64_t step = axis < front ? 0 : own.steps[index(axis - front)];
      for (const bool is_own : {is_resize, !is_resize}) {
        const std::int64_t places = is_own ? size : y[axis] / size;
        if (places == 1) continue;
        view.steps[index(sizes.rank())] = is_own ? step : 0;
        sizes.append(places);
      }
    }
    return {sizes, view};
  }

  std::string op_type_;
  std::int64_t axis_;
  std::vector<std::int64_t> permutation_;
};

// Whether a Resize by whole scales repeats each pixel: so do these roundings. The middle of repeat
// r of pixel p in s is p + (r + 1/2) / s - 1/2, nearest to p for each r.
bool repeats_pixels(const Node& node) {
  const std::string coordinates = node.text("coordinate_transformation_mode", "half_pixel");
  const std::string rounding = node.text("nearest_mode", "round_prefer_floor");
  const bool is_nearest = coordinates == "asymmetric" ? rounding == "floor"
                                                      : coordinates.ends_with("half_pixel") &&
                                                            rounding.starts_with("round");
  return node.text("mode", "nearest") == "nearest" && is_nearest && node.integers("axes").empty();
}

bool has_whole_scales(const Node& node) {
  const Value* scales = node.input(2);
  if (scales == nullptr || scales->constant == nullptr || !scales->shape) return false;
  const auto* scale = static_cast<const float*>(scales->constant);
  return std::all_of(scale, scale + scales->shape->elements(),
                     [](float one) { return one >= 1 && one == std::floor(one); });
}

}  // namespace

std::string refused_move(const Node& node) {
  Node moved = node;
  if (node.op_type != "Concat") moved.inputs.resize(1);  // the others are sizes, axes, scales
  if (std::string reason = refused_floats(moved); !reason.empty()) return reason;
  if (node.op_type == "Resize" && !(repeats_pixels(node) && has_whole_scales(node)))
    return "expected whole scales, and pixels that are repeated, on device 'gpu'";
  return "";
}

std::unique_ptr<Step> make_move(const Node& node, StepArguments arguments) {
  return std::make_unique<Move>(node, std::move(arguments));
}

}  // namespace flownpu::gpu
