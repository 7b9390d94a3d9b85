// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/run/encoder_layers.h"

#include <algorithm>
#include <utility>

#include "ops/error.h"
#include "ops/npu/nodes/lowered_node.h"
#include "ops/transformer/graph/fields.h"

namespace flownpu::npu {
namespace {

// The patches of an image [channels, side, side], as [patches][channels, patch, patch].
std::vector<float> cut_into_patches(const EncoderShape& shape, const float* pixels) {
  const std::int64_t side = shape.grid * shape.patch;
  std::vector<float> patches(static_cast<std::size_t>(shape.pixels()));
  auto target = patches.begin();
  for (std::int64_t place = 0; place < shape.patches(); ++place) {
    const std::int64_t corner = (place / shape.grid * side + place % shape.grid) * shape.patch;
    for (std::int64_t row = 0; row < shape.channels * shape.patch; ++row) {
      const std::int64_t channel = row / shape.patch;
      const float* source = pixels + (channel * side + row % shape.patch) * side + corner;
      target = std::copy_n(source, shape.patch, target);
    }
  }
  return patches;
}

}  // namespace

EncoderLayers::EncoderLayers(const Node& node, std::shared_ptr<CompiledDesigns> designs,
                             const HostCompute& host)
    : shape_(EncoderShape::read(node)),
      designs_(std::move(designs)),
      record_(designs_->artifacts().require("encode", node).front()),
      buffers_(designs_->runtime(), {&record_, 1}, node),
      program_(designs_, *record_, buffers_, host) {
  transformer::check_values(node, "input", node.inputs, {{DataType::kFloat32}});
  transformer::check_values(node, "output", node.outputs, {{DataType::kFloat32}});
}

std::int64_t EncoderLayers::multiply_adds() const {
  const auto of = [](const DenseProjection& part) { return part.inner * part.columns; };
  std::int64_t layer = 2 * shape_.heads * shape_.head_size * shape_.patches();
  for (const DenseProjection& part : shape_.projections()) layer += of(part);
  return (of(shape_.embedding()) + shape_.layers * layer) * shape_.patches() +
         of(shape_.projector()) * shape_.tokens();
}

void EncoderLayers::infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const {
  const Shape& pixels = inputs[0].shape;
  const std::int64_t side = shape_.grid * shape_.patch;
  if (pixels.rank() != 4 || pixels[1] != shape_.channels || pixels[2] != side ||
      pixels[3] != side) {
    fail("expected pixels of shape [images, ", shape_.channels, ", ", side, ", ", side, "], got ",
         to_string(pixels));
  }
  outputs[0] = Shape{pixels[0], shape_.tokens(), shape_.features};
}

void EncoderLayers::run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
                        std::span<std::byte> /*scratch*/) const {
  const std::lock_guard lock(mutex_);
  designs_->begin_run();
  const std::int64_t images = inputs[0].shape[0];
  const std::int64_t features = shape_.tokens() * shape_.features;
  for (std::int64_t image = 0; image < images; ++image) {
    program_.write(cut_into_patches(shape_, inputs[0].as<const float>() + image * shape_.pixels()));
    program_.run(0, ", image " + std::to_string(image));
    program_.read({outputs[0].as<float>() + image * features, static_cast<std::size_t>(features)});
  }
}

std::string describe_encoder(const Node& node, const CompiledDesigns& designs) {
  const std::int64_t layers = EncoderShape::read(node).layers;
  const ProgramRecord* program = designs.artifacts().require("encode", node).front();
  designs.artifacts().check({&program, 1});
  return "an encoder's " + std::to_string(layers) + (layers == 1 ? " layer in " : " layers in ") +
         std::to_string(program->array_dispatches()) + " dispatches an image";
}

}  // namespace flownpu::npu
