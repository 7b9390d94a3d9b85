// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/run/host_states.h"

#include <array>
#include <cmath>
#include <vector>

#include "ops/npu/nodes/lowered_node.h"
#include "ops/npu/run/layer_states.h"
#include "ops/transformer/decoder.h"

namespace flownpu::npu {
namespace {

// What is between the projections of a layer that keeps a state.
class MixerOfRows final : public HostOperator {
 public:
  explicit MixerOfRows(const HostCallReader& reader)
      : layer_(reader.number_below("layer", transformer::kMostLayers)),
        rows_(reader.size("rows")),
        columns_{reader.size("columns"), reader.size("projected"), reader.size("mixed")},
        lines_{reader.line("x_line", columns_[0]), reader.line("line", columns_[1]),
               reader.line("y_line", columns_[2])} {
    reader.arguments({{"x", rows_ * lines_[0] * kBFloat16Bytes},
                      {"projected", rows_ * lines_[1] * kBFloat16Bytes},
                      {"y", rows_ * lines_[2] * kBFloat16Bytes}});
  }

  void run(const HostCompute& compute, std::span<const View> arguments, std::int64_t /*position*/,
           std::size_t rows) override {
    if (compute.states == nullptr)
      fail("[FlowNPU] expected a decoder with states for a program that computes them");
    const std::size_t count = std::min(rows, rows_);
    for (std::size_t i = 0; i < values_.size(); ++i) values_.at(i).resize(count * columns_.at(i));
    for (std::size_t i = 0; i < 2; ++i) {
      const View& view = arguments[i];
      to_host(view, 0, view.bytes / rows_ * count);
      for (std::size_t row = 0; row < count; ++row)
        widen(elements_of<std::uint16_t>(view) + row * lines_.at(i), columns_.at(i),
              values_.at(i).data() + row * columns_.at(i));
    }
    compute.states->mix(layer_, values_[0], values_[1], values_[2]);
    const View& y = arguments[2];
    for (std::size_t row = 0; row < count; ++row)
      narrow(*compute.kernels, values_[2].data() + row * columns_[2], columns_[2],
             elements_of<std::uint16_t>(y) + row * lines_[2]);
    to_device(y, 0, y.bytes / rows_ * count);
  }

 private:
  std::size_t layer_, rows_;
  std::array<std::size_t, 3> columns_, lines_;  // of x, projected, y
  std::array<std::vector<float>, 3> values_;
};

// Multiplies attention's output by the sigmoid of rows behind those of QKV.
class OutputGate final : public HostOperator {
 public:
  explicit OutputGate(const HostCallReader& reader)
      : rows_(reader.size("rows")),
        columns_(reader.size("columns")),
        first_(reader.size("first")),
        line_(reader.line("line", first_ + columns_)) {
    reader.arguments({{"gate", rows_ * line_ * kBFloat16Bytes},
                      {"y", rows_ * columns_ * kBFloat16Bytes}});
  }

  void run(const HostCompute& compute, std::span<const View> arguments, std::int64_t /*position*/,
           std::size_t rows) override {
    const std::size_t count = std::min(rows, rows_);
    for (const View& view : arguments) to_host(view, 0, view.bytes / rows_ * count);
    const auto* gate = elements_of<std::uint16_t>(arguments[0]);
    auto* y = elements_of<std::uint16_t>(arguments[1]);
    for_rows(compute, count, 2 * columns_, scratch_, [&](std::size_t row, float* values) {
      widen(y + row * columns_, columns_, values);
      float* open = values + columns_;
      widen(gate + row * line_ + first_, columns_, open);
      for (std::size_t i = 0; i < columns_; ++i) values[i] /= 1 + std::exp(-open[i]);
      narrow(*compute.kernels, values, columns_, y + row * columns_);
    });
    to_device(arguments[1], 0, arguments[1].bytes / rows_ * count);
  }

 private:
  std::size_t rows_, columns_, first_, line_;
  std::vector<float> scratch_;
};

}  // namespace

std::unique_ptr<HostOperator> make_output_gate(const HostCallReader& reader) {
  return std::make_unique<OutputGate>(reader);
}

std::unique_ptr<HostOperator> make_mixer(const HostCallReader& reader) {
  return std::make_unique<MixerOfRows>(reader);
}

}  // namespace flownpu::npu
