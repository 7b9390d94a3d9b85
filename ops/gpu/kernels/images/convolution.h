// SPDX-License-Identifier: Apache-2.0
// Convolution of images, as implicit GEMM and by Winograd's transforms: two kernels with the same
// arguments and parameters.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "ops/device.h"
#include "ops/gpu/context/context.h"
#include "ops/gpu/language/kernel.h"

namespace flownpu::gpu {

// Convolution over two axes; one axis is the second, with one window along the first. `rows` and
// `channels`: of a group, of the result and of the image.
struct ConvolutionShape {
  struct Axis {
    std::int64_t kernel = 1;
    std::int64_t stride = 1;
    std::int64_t dilation = 1;
  };
  std::int64_t rows = 0;
  std::int64_t channels = 0;
  std::int64_t groups = 1;
  std::array<Axis, 2> axes;
  Element given = Element::kFloat32;   // of all but the weight
  Element weight = Element::kFloat32;  // or float16, bfloat16
  bool has_bias = false;
  bool has_residual = false;
  bool is_relu = false;
  std::int64_t upsample = 1;  // each pixel of x is read so many times along each axis
};

// Arguments: x [images, C, height, width], w [M, channels, kernel, kernel], y [images, M, plane],
// then, if the shape has them, bias [M] and residual, like y; parameters: rows, M, channels, C, the
// depth of the product, columns (images x plane), plane, the width of the result, height, width,
// the pads before the first row and column. Layers of all widths so share their kernels.
KernelDescription convolution(const ConvolutionShape& shape);
Grid convolution_grid(const ConvolutionShape& shape, std::int64_t columns);

// The same for windows of 3 x 3 neighbouring pixels, one pixel apart (winograd.cc). A tile of 2 x 2
// results takes 16 products where their windows take 36.
KernelDescription winograd(const ConvolutionShape& shape);
// `width`: of the result.
Grid winograd_grid(const ConvolutionShape& shape, std::int64_t columns, std::int64_t plane,
                   std::int64_t width);

// The ways to compute a convolution, the default first, of which a faster measured one may take the
// place: true is winograd(), false convolution(). Throws Error if Winograd's is wanted, and is not
// right; GpuError.
std::vector<bool> ways_with_winograd(GpuWinograd wanted, const ConvolutionShape& shape,
                                     Context& context);
// Whether this device's winograd() computes what convolution() computes, on integers with which
// both are exact; it is tried once for each driver. Throws GpuError.
bool winograd_is_right(Context& context);

}  // namespace flownpu::gpu
