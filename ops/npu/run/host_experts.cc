// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/run/host_experts.h"

#include "ops/npu/nodes/lowered_node.h"
#include "ops/npu/run/layer_experts.h"
#include "ops/transformer/decoder.h"

namespace flownpu::npu {
namespace {

const LayerExperts& experts_of(const HostCompute& compute) {
  if (compute.experts == nullptr)
    fail("[FlowNPU] expected a decoder with experts for a program that computes them");
  return *compute.experts;
}

// Adds the experts' answers to the residual stream, and normalises the sum where there is a weight.
class ExpertsOfRows final : public HostOperator {
 public:
  explicit ExpertsOfRows(const HostCallReader& reader)
      : layer_(reader.number_below("layer", transformer::kMostLayers)),
        rows_(reader.size("rows")),
        columns_(reader.size("columns")),
        x_line_(reader.line("x_line", columns_)),
        y_line_(reader.line("y_line", columns_)),
        epsilon_(reader.real("epsilon")) {
    Arguments expected{{"x", rows_ * x_line_ * kBFloat16Bytes},
                       {"s", rows_ * columns_ * sizeof(float)},
                       {"weight", columns_ * kBFloat16Bytes},
                       {"y", rows_ * y_line_ * kBFloat16Bytes}};
    if (reader.argument(2).name == "weight")
      weight_.resize(columns_);
    else
      expected.erase(expected.begin() + 2);
    reader.arguments(expected);
  }

  void run(const HostCompute& compute, std::span<const View> arguments, std::int64_t /*position*/,
           std::size_t rows) override {
    const std::size_t count = std::min(rows, rows_);
    const View& x = arguments[0];
    const View& y = arguments.back();
    to_host(x, 0, x.bytes / rows_ * count);
    to_host(arguments[1], 0, arguments[1].bytes / rows_ * count);
    given_.resize(count * columns_);
    made_.resize(count * columns_);
    for (std::size_t row = 0; row < count; ++row)
      widen(elements_of<std::uint16_t>(x) + row * x_line_, columns_,
            given_.data() + row * columns_);
    experts_of(compute).answer(layer_, given_, made_);
    if (!weight_.empty()) widen(elements_of<std::uint16_t>(arguments[2]), columns_, weight_.data());
    for_rows(compute, count, columns_, scratch_, [&](std::size_t row, float* values) {
      const auto n = static_cast<std::int64_t>(columns_);
      float* sum = elements_of<float>(arguments[1]) + row * columns_;
      compute.kernels->add(made_.data() + row * columns_, sum, sum, n);
      const float* result = sum;
      if (!weight_.empty()) {
        compute.kernels->rms_norm(sum, weight_.data(), epsilon_, values, n);
        result = values;
      }
      narrow(*compute.kernels, result, columns_, elements_of<std::uint16_t>(y) + row * y_line_);
    });
    to_device(arguments[1], 0, arguments[1].bytes / rows_ * count);
    to_device(y, 0, y.bytes / rows_ * count);
  }

 private:
  std::size_t layer_, rows_, columns_, x_line_, y_line_;
  float epsilon_;
  std::vector<float> weight_, given_, made_, scratch_;
};

// The experts of one row, which an array then computes.
class Route final : public HostOperator {
 public:
  explicit Route(const HostCallReader& reader)
      : layer_(reader.number_below("layer", transformer::kMostLayers)),
        experts_(reader.size("experts")),
        given_(reader.size("columns")) {
    reader.arguments({{"x", given_.size() * kBFloat16Bytes},
                      {"chosen", experts_ * sizeof(std::int32_t)},
                      {"shares", experts_ * sizeof(float)}});
  }

  void run(const HostCompute& compute, std::span<const View> arguments, std::int64_t /*position*/,
           std::size_t /*rows*/) override {
    to_host(arguments[0], 0, arguments[0].bytes);
    widen(elements_of<std::uint16_t>(arguments[0]), given_.size(), given_.data());
    experts_of(compute).route(layer_, given_, {elements_of<std::int32_t>(arguments[1]), experts_},
                              {elements_of<float>(arguments[2]), experts_});
  }

 private:
  std::size_t layer_, experts_;
  std::vector<float> given_;
};

// Adds an array's answers for one row.
class AddExperts final : public HostOperator {
 public:
  explicit AddExperts(const HostCallReader& reader)
      : experts_(reader.size("experts")),
        answer_(reader.size("columns")),
        line_(reader.line("line", answer_.size())) {
    reader.arguments({{"answers", experts_ * line_ * kBFloat16Bytes},
                      {"shares", experts_ * sizeof(float)},
                      {"s", answer_.size() * sizeof(float)},
                      {"y", answer_.size() * kBFloat16Bytes}});
  }

  void run(const HostCompute& compute, std::span<const View> arguments, std::int64_t /*position*/,
           std::size_t /*rows*/) override {
    const auto n = static_cast<std::int64_t>(answer_.size());
    for (const std::size_t argument : {0, 2})
      to_host(arguments[argument], 0, arguments[argument].bytes);
    float* sum = elements_of<float>(arguments[2]);
    for (std::size_t expert = 0; expert < experts_; ++expert) {
      widen(elements_of<std::uint16_t>(arguments[0]) + expert * line_, answer_.size(),
            answer_.data());
      compute.kernels->add_scaled(answer_.data(), elements_of<float>(arguments[1])[expert], sum, n);
    }
    narrow(*compute.kernels, sum, answer_.size(), elements_of<std::uint16_t>(arguments[3]));
    for (const std::size_t argument : {2, 3})
      to_device(arguments[argument], 0, arguments[argument].bytes);
  }

 private:
  std::size_t experts_;
  std::vector<float> answer_;
  std::size_t line_;
};

}  // namespace

std::unique_ptr<HostOperator> make_experts_of_rows(const HostCallReader& reader) {
  return std::make_unique<ExpertsOfRows>(reader);
}

std::unique_ptr<HostOperator> make_route(const HostCallReader& reader) {
  return std::make_unique<Route>(reader);
}

std::unique_ptr<HostOperator> make_add_experts(const HostCallReader& reader) {
  return std::make_unique<AddExperts>(reader);
}

}  // namespace flownpu::npu
