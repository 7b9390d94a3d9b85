// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/encoder_layers.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ops/error.h"
#include "ops/npu/lowered_node.h"
#include "ops/number_formats.h"

namespace flownpu::npu {
namespace {

std::uint16_t* elements(Buffer& buffer) {
  return reinterpret_cast<std::uint16_t*>(buffer.bytes().data());
}

}  // namespace

EncoderLayers::EncoderLayers(const Node& node, std::shared_ptr<CompiledDesigns> designs)
    : shape_(EncoderShape::read(node)), designs_(std::move(designs)), calls_(designs_) {
  check_values(node, "input", node.inputs, {{DataType::kFloat32}});
  check_values(node, "output", node.outputs, {{DataType::kFloat32}});
  for (const auto& [name, bytes] :
       {std::pair("weights", shape_.weight_bytes()), std::pair("vectors", shape_.vector_bytes())})
    buffers_[name] = upload(designs_->runtime(), packed(node, name, bytes));
  const std::vector<EncoderCall> calls = encoder_calls(shape_);
  make_buffers(calls);
  for (const EncoderCall& call : calls) {
    std::vector<View> arguments;
    arguments.reserve(call.arguments.size());
    for (const NamedView& view : call.arguments)
      arguments.push_back({buffers_.find(view.buffer)->second.get(), view.offset, view.bytes});
    calls_.add(designs_->artifacts().require(call.op_type, call.attributes), call.name, arguments);
  }
}

// As large as the calls take them; zeros, and ones where weights have their biases.
void EncoderLayers::make_buffers(const std::vector<EncoderCall>& calls) {
  std::map<std::string_view, std::size_t> sizes;
  for (const EncoderCall& call : calls) {
    for (const NamedView& view : call.arguments)
      sizes[view.buffer] = std::max(sizes[view.buffer], view.offset + view.bytes);
  }
  const auto lines = encoder_lines(shape_);
  for (const auto& [name, bytes] : sizes) {
    if (buffers_.contains(name)) continue;
    std::unique_ptr<Buffer> buffer = designs_->runtime().allocate(bytes);
    if (const auto found = lines.find(name); found != lines.end()) {
      const DenseProjection& reader = found->second;
      const std::int64_t count = static_cast<std::int64_t>(bytes / kBFloat16Bytes);
      for (std::int64_t at = reader.bias_row(); at < count; at += reader.padded_rows())
        elements(*buffer)[at] = to_bfloat16(1.0F);
    }
    buffer->to_device(0, bytes);
    buffers_.emplace(name, std::move(buffer));
  }
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

// Each patch's values, channel by channel and row by row, as the convolution's weight has them.
void EncoderLayers::write_patches(const float* pixels) const {
  Buffer& buffer = *buffers_.find("patches")->second;
  std::uint16_t* line = elements(buffer);
  const std::int64_t side = shape_.grid * shape_.patch;
  const std::int64_t length = shape_.embedding().padded_rows();
  for (std::int64_t place = 0; place < shape_.patches(); ++place, line += length) {
    const std::int64_t corner = (place / shape_.grid * side + place % shape_.grid) * shape_.patch;
    std::uint16_t* target = line;
    for (std::int64_t row = 0; row < shape_.channels * shape_.patch; ++row) {
      const std::int64_t channel = row / shape_.patch;
      const float* source = pixels + (channel * side + row % shape_.patch) * side + corner;
      target = std::transform(source, source + shape_.patch, target, to_bfloat16);
    }
  }
  buffer.to_device(0, buffer.bytes().size());
}

void EncoderLayers::read_features(float* features) const {
  Buffer& buffer = *buffers_.find("features")->second;
  const std::int64_t length = shape_.projector().padded_columns();
  buffer.to_host(0, static_cast<std::size_t>(shape_.tokens() * length) * kBFloat16Bytes);
  const std::uint16_t* line = elements(buffer);
  for (std::int64_t token = 0; token < shape_.tokens(); ++token, line += length)
    features = std::transform(line, line + shape_.features, features, from_bfloat16);
}

void EncoderLayers::run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
                        std::span<std::byte> /*scratch*/) const {
  const std::lock_guard lock(mutex_);
  designs_->begin_run();
  const std::int64_t images = inputs[0].shape[0];
  for (std::int64_t image = 0; image < images; ++image) {
    write_patches(inputs[0].as<const float>() + image * shape_.pixels());
    calls_.run(0, ", image " + std::to_string(image));
    read_features(outputs[0].as<float>() + image * shape_.tokens() * shape_.features);
  }
}

std::string describe_encoder(const EncoderShape& shape,
                             const std::shared_ptr<CompiledDesigns>& designs) {
  const std::vector<EncoderCall> calls = encoder_calls(shape);
  for (const EncoderCall& call : calls) designs->artifacts().require(call.op_type, call.attributes);
  return "an encoder's " + std::to_string(shape.layers) +
         (shape.layers == 1 ? " layer in " : " layers in ") + std::to_string(calls.size()) +
         " dispatches an image";
}

}  // namespace flownpu::npu
