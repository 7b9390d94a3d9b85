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
#include "ops/cpu/windows.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

template <typename Function>
class Pool final : public Step {
 public:
  Pool(const Node& node, const Context& context)
      : context_(context),
        counts_pads_(node.integer("count_include_pad", 0) != 0),
        windows_(node, node.integers("kernel_shape")) {
    const std::string name = to_string(node);
    if (const Value* x = node.input(0); x->shape && x->shape->rank() != windows_.rank())
      fail("[", name, "] expected images of ", windows_.rank() - 2, " axes after two others, got ",
           to_string(*x->shape));
    for (const Windows& axis : windows_.windows()) {
      if (windows_.has_explicit_pads() && std::max(axis.head, axis.tail) >= axis.kernel)
        fail("[", name, "] expected pads smaller than the window, got ",
             std::max(axis.head, axis.tail), " for ", axis.kernel);
    }
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& x = inputs[0].shape;
    outputs[0] = windows_.result(x, x.rank() > 1 ? x[1] : 0);
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const Shape& x = inputs[0].shape;
    const auto [deep, down, across] = windows_.fitted(x);
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
  // Windows side by side that are added up together, on the stack.
  static constexpr std::int64_t kColumns = 256;
  using Total = typename Function::template Total<float>;

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
  bool counts_pads_;
  SlidingWindows windows_;
};

constexpr Port kX[] = {{.name = "X", .types = kFloats, .type_letter = 'T'}};
constexpr Port kY[] = {{.name = "Y", .types = kFloats, .type_letter = 'T'}};
constexpr Port kLargest[] = {{.name = "Y", .types = kFloats, .type_letter = 'T'},
                             optional({.name = "Indices", .types = kNone})};
constexpr AttributeRule kAverage[] = {kAutoPad,   flag("ceil_mode"), flag("count_include_pad"),
                                      kDilations, kKernelShape,      kPads,
                                      kStrides};
constexpr AttributeRule kMaximum[] = {kAutoPad, flag("ceil_mode"), kDilations, kKernelShape, kPads,
                                      // the order of Indices
                                      flag("storage_order"), kStrides};

constexpr Operator kOperators[] = {
    {{"", "AveragePool", 7, 22, kX, kY, kAverage}, widened<make<Pool<Mean>>>},
    {{"", "MaxPool", 1, 22, kX, kLargest, kMaximum}, widened<make<Pool<Largest>>>},
};

}  // namespace

std::span<const Operator> pool_operators() { return kOperators; }

}  // namespace flownpu::cpu
