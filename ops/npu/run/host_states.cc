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

// Rows of bf16 in a view, and their values.
struct RowsOf {
  std::size_t columns, line;
  std::vector<float> values;

  std::pair<std::string_view, std::size_t> argument(std::string_view name, std::size_t rows) const {
    return {name, rows * line * kBFloat16Bytes};
  }
  void read(const View& view, std::size_t rows, std::size_t count) {
    to_host(view, 0, view.bytes / rows * count);
    room(count);
    for (std::size_t row = 0; row < count; ++row)
      widen(elements_of<std::uint16_t>(view) + row * line, columns, values.data() + row * columns);
  }
  void room(std::size_t count) { values.resize(count * columns); }
  void write(const HostCompute& compute, const View& view, std::size_t rows, std::size_t count) {
    for (std::size_t row = 0; row < count; ++row)
      narrow(*compute.kernels, values.data() + row * columns, columns,
             elements_of<std::uint16_t>(view) + row * line);
    to_device(view, 0, view.bytes / rows * count);
  }
};

// The layer, and the rows of x, of products and of what is made of them.
class StateOperator : public HostOperator {
 protected:
  explicit StateOperator(const HostCallReader& reader)
      : layer_(reader.number_below("layer", transformer::kMostLayers)),
        rows_(reader.size("rows")),
        x_{reader.size("columns"), reader.line("x_line", reader.size("columns")), {}},
        projected_{reader.size("projected"), reader.line("line", reader.size("projected")), {}},
        y_{reader.size("mixed"), reader.line("y_line", reader.size("mixed")), {}} {}

  static LayerStates& states_of(const HostCompute& compute) {
    if (compute.states == nullptr)
      fail("[FlowNPU] expected a decoder with states for a program that computes them");
    return *compute.states;
  }
  std::span<std::uint16_t> elements(const View& view) const {
    return {elements_of<std::uint16_t>(view), view.bytes / kBFloat16Bytes};
  }

  std::size_t layer_, rows_;
  RowsOf x_, projected_, y_;
};

// The mixer of a layer that keeps a state: everything between its projections.
class MixerOfRows final : public StateOperator {
 public:
  explicit MixerOfRows(const HostCallReader& reader) : StateOperator(reader) {
    reader.arguments({x_.argument("x", rows_), projected_.argument("projected", rows_),
                      y_.argument("y", rows_)});
  }

  void run(const HostCompute& compute, std::span<const View> arguments, std::int64_t /*position*/,
           std::size_t rows) override {
    const std::size_t count = std::min(rows, rows_);
    x_.read(arguments[0], rows_, count);
    projected_.read(arguments[1], rows_, count);
    y_.room(count);
    states_of(compute).mix(
        layer_, {static_cast<std::int64_t>(count), x_.values, projected_.values, y_.values});
    y_.write(compute, arguments[2], rows_, count);
  }
};

// The part of a mixer before a gated delta rule that the array applies.
class BeforeDelta final : public StateOperator {
 public:
  explicit BeforeDelta(const HostCallReader& reader)
      : StateOperator(reader),
        token_(reader.size("token")),
        state_(reader.size("state")),
        heads_(reader.size("heads")) {
    reader.arguments({x_.argument("x", rows_),
                      projected_.argument("projected", rows_),
                      {"tokens", rows_ * heads_ * token_ * kBFloat16Bytes},
                      {"states", state_ * kBFloat16Bytes}});
  }

  void run(const HostCompute& compute, std::span<const View> arguments, std::int64_t /*position*/,
           std::size_t rows) override {
    const std::size_t count = std::min(rows, rows_);
    x_.read(arguments[0], rows_, count);
    projected_.read(arguments[1], rows_, count);
    states_of(compute).before_delta(
        layer_, {static_cast<std::int64_t>(count), x_.values, projected_.values, {}},
        elements(arguments[2]), token_, elements(arguments[3]));
    for (const std::size_t made : {2, 3}) to_device(arguments[made], 0, arguments[made].bytes);
  }

 private:
  std::size_t token_, state_, heads_;
};

// The part of a mixer after that rule.
class AfterDelta final : public StateOperator {
 public:
  explicit AfterDelta(const HostCallReader& reader)
      : StateOperator(reader), state_(reader.size("state")), delta_{y_.columns, y_.columns, {}} {
    reader.arguments({projected_.argument("projected", rows_),
                      delta_.argument("delta", rows_),
                      {"states", state_ * kBFloat16Bytes},
                      y_.argument("y", rows_)});
  }

  void run(const HostCompute& compute, std::span<const View> arguments, std::int64_t /*position*/,
           std::size_t rows) override {
    const std::size_t count = std::min(rows, rows_);
    projected_.read(arguments[0], rows_, count);
    delta_.read(arguments[1], rows_, count);
    to_host(arguments[2], 0, arguments[2].bytes);
    y_.room(count);
    states_of(compute).after_delta(
        layer_, {static_cast<std::int64_t>(count), {}, projected_.values, y_.values}, delta_.values,
        elements(arguments[2]));
    y_.write(compute, arguments[3], rows_, count);
  }

 private:
  std::size_t state_;
  RowsOf delta_;
};

// Multiplies attention's output by the sigmoid of rows behind those of QKV.
class OutputGate final : public HostOperator {
 public:
  explicit OutputGate(const HostCallReader& reader)
      : rows_(reader.size("rows")),
        columns_(reader.size("columns")),
        first_(reader.size("first")),
        line_(reader.line("line", first_ + columns_)) {
    reader.arguments(
        {{"gate", rows_ * line_ * kBFloat16Bytes}, {"y", rows_ * columns_ * kBFloat16Bytes}});
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

std::unique_ptr<HostOperator> make_before_delta(const HostCallReader& reader) {
  return std::make_unique<BeforeDelta>(reader);
}

std::unique_ptr<HostOperator> make_after_delta(const HostCallReader& reader) {
  return std::make_unique<AfterDelta>(reader);
}

std::unique_ptr<HostOperator> make_mixer(const HostCallReader& reader) {
  return std::make_unique<MixerOfRows>(reader);
}

}  // namespace flownpu::npu
