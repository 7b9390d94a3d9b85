// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <utility>

#include "ops/npu/match/convolution.h"
#include "ops/npu/operators/steps.h"

namespace flownpu::npu {
namespace {

enum Input : std::uint8_t { kPictures, kFilters, kBias, kAdded };

class ConvolutionStep final : public Step {
 public:
  ConvolutionStep(const Node& node, std::unique_ptr<OperatorPrograms> programs,
                  std::unique_ptr<Step> host, const cpu::Context& context)
      : programs_(std::move(programs)),
        host_(std::move(host)),
        context_(context),
        sizes_(sizes_of_convolution(node)),
        is_rectified_(node.text("activation", "") == "Relu") {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    host_->infer(inputs, outputs);
  }
  std::size_t scratch_bytes(std::span<const Tensor> inputs) const override {
    cpu::Scratch scratch;
    scratch.take<float>(given_values(inputs[kPictures].shape[0]));
    scratch.take<float>(made_values(inputs[kPictures].shape[0]));
    return std::max(scratch.bytes(), host_->scratch_bytes(inputs));
  }
  std::int64_t multiply_adds() const override { return host_->multiply_adds(); }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> memory) const override {
    const std::int64_t pictures = inputs[kPictures].shape[0];
    const std::int64_t plane = sizes_.lines() * sizes_.pixels();
    const std::int64_t rows = pictures * plane;
    const std::vector<ProgramPart> parts = parts_of(programs_->records(), rows);
    if (!programs_->is_worth(rows * programs_->description().multiply_adds, dispatches_of(parts)))
      return host_->run(inputs, outputs, memory);
    cpu::Scratch scratch(memory.data());
    auto* given = scratch.take<float>(given_values(pictures));
    auto* made = scratch.take<float>(made_values(pictures));
    for (const ProgramPart& part : parts) {
      const std::int64_t first = part.first / plane;
      const std::int64_t count = part.count / plane;
      lay_out(inputs[kPictures], first, count, given);
      {
        const std::unique_lock lock = programs_->begin();
        programs_->run(part.program, {given, static_cast<std::size_t>(given_values(count))},
                       {made, static_cast<std::size_t>(made_values(count))});
      }
      finish(made, first, count, inputs, outputs[0]);
    }
  }

 private:
  std::int64_t given_values(std::int64_t pictures) const {
    return (sizes_.head() + pictures * sizes_.padded_lines() * sizes_.line()) * sizes_.channels;
  }
  std::int64_t made_values(std::int64_t pictures) const {
    return sizes_.rows(pictures) * sizes_.filters;
  }

  // Pictures channels-last, between their zeros.
  void lay_out(const Tensor& x, std::int64_t first, std::int64_t count, float* given) const {
    const std::int64_t channels = sizes_.channels;
    const std::int64_t repeats = sizes_.upsample;
    const std::int64_t from_width = sizes_.width / repeats;
    const std::int64_t from_plane = sizes_.height / repeats * from_width;
    std::fill_n(given, sizes_.head() * channels, 0.0F);
    context_.pool->run_rows(count * sizes_.padded_lines(), [&](std::int64_t row) {
      const std::int64_t y = row % sizes_.padded_lines();
      float* to = given + (sizes_.head() + row * sizes_.line()) * channels;
      std::fill_n(to, sizes_.line() * channels, 0.0F);
      if (y >= sizes_.height) return;
      const std::int64_t picture = first + row / sizes_.padded_lines();
      const float* from =
          x.as<const float>() + picture * channels * from_plane + y / repeats * from_width;
      for (std::int64_t channel = 0; channel < channels; ++channel, from += from_plane) {
        for (std::int64_t pixel = 0; pixel < sizes_.width; ++pixel)
          to[pixel * channels + channel] = from[pixel / repeats];
      }
    });
  }

  // Adds bias and residual, rectifies, and writes planes of channels.
  void finish(const float* made, std::int64_t first, std::int64_t count,
              std::span<const Tensor> inputs, const Tensor& y) const {
    const auto given = [&](Input input) -> const float* {
      const bool is_there = input < inputs.size() && inputs[input].present();
      return is_there ? inputs[input].as<const float>() : nullptr;
    };
    const float* bias = given(kBias);
    const float* added = given(kAdded);
    const std::int64_t filters = sizes_.filters;
    const std::int64_t plane = sizes_.lines() * sizes_.pixels();
    context_.pool->run_rows(count * filters, [&](std::int64_t row) {
      const std::int64_t filter = row % filters;
      const float* from = made + row / filters * sizes_.picture_rows() * filters + filter;
      const std::int64_t begin = (first * filters + row) * plane;
      float* to = y.as<float>() + begin;
      for (std::int64_t at = 0; at < plane; ++at) {
        const std::int64_t place = at / sizes_.pixels() * sizes_.line() + at % sizes_.pixels();
        float value = from[place * filters];
        if (bias != nullptr) value += bias[filter];
        if (added != nullptr) value += added[begin + at];
        to[at] = is_rectified_ ? std::max(value, 0.0F) : value;
      }
    });
  }

  std::unique_ptr<OperatorPrograms> programs_;
  std::unique_ptr<Step> host_;
  cpu::Context context_;
  ConvolutionSizes sizes_;
  bool is_rectified_;
};

}  // namespace

std::unique_ptr<Step> make_convolution_step(const Node& node,
                                            std::unique_ptr<OperatorPrograms> programs,
                                            std::unique_ptr<Step> host,
                                            const cpu::Context& context) {
  return std::make_unique<ConvolutionStep>(node, std::move(programs), std::move(host), context);
}

}  // namespace flownpu::npu
