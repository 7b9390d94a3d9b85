// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/language/image.h"

#include "ops/gpu/language/text.h"

namespace flownpu::gpu::image {
namespace {

// A component of a texel is chosen by comparisons: an index would make the compiler put the texel
// into memory.
constexpr const char* kFunctions = R"(
uint word_of_image(__read_only image1d_buffer_t image, int offset) {
  const uint4 texel = read_imageui(image, offset / 16);
  const uint2 two = offset % 16 < 8 ? texel.lo : texel.hi;
  return offset % 8 < 4 ? two.x : two.y;
}
uchar uchar_of_image(__read_only image1d_buffer_t image, int offset) {
  return (uchar)(word_of_image(image, offset) >> (offset % 4 * 8));
}
ushort ushort_of_image(__read_only image1d_buffer_t image, int offset) {
  return (ushort)(word_of_image(image, offset) >> (offset % 4 * 8));
}
uint4 uint4_of_image(__read_only image1d_buffer_t image, int offset) {
  return read_imageui(image, offset / 16);
}
ushort8 ushort8_of_image(__read_only image1d_buffer_t image, int offset) {
  return as_ushort8(uint4_of_image(image, offset));
}
)";

}  // namespace

std::string functions() { return kFunctions; }

std::string type() { return "__read_only image1d_buffer_t "; }

std::string read(const std::string& type, const std::string& image, const std::string& offset) {
  return text_of(type, "_of_image(", image, ", ", offset, ")");
}

}  // namespace flownpu::gpu::image
