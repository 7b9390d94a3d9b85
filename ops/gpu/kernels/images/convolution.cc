// SPDX-License-Identifier: Apache-2.0
// Convolution of images [N, C, H, W] as implicit GEMM: for a group of channels the weight
// [M, C taps] times the windows [C taps, N pixels], which are read where they are in the image.
// Lanes beside one another have neighbouring pixels in both images. The weight keeps ONNX's order
// (channels, then taps), since a work-group reads it into its own memory before use: the paper's
// order (G, S_O, O4, HW, S_I, I4) pays where lanes read weights themselves.
#include "ops/gpu/kernels/images/convolution.h"

#include "ops/gpu/kernels/pieces.h"

namespace flownpu::gpu {
namespace {

// The first pixel of the lane's window, which may be a pad.
constexpr const char* kSetup = R"(
  const int image = own / args.plane;
  const int first_y = own % args.plane / args.result_width * args.stride_y - args.head_y;
  const int first_x = own % args.plane % args.result_width * args.stride_x - args.head_x;
)";

constexpr const char* kWindow = R"(
  const int tap = k % args.taps;
  const int y = first_y + tap / args.kernel_x * args.dilation_y;
  const int x = first_x + tap % args.kernel_x * args.dilation_x;
  if (y >= 0 && y < args.height * args.upsample && x >= 0 && x < args.width * args.upsample)
    element = args.x.Read(image, group(2) * args.channels + k / args.taps, y / args.upsample,
                          x / args.upsample);
)";

}  // namespace

KernelDescription convolution(const ConvolutionShape& shape) {
  const std::int64_t taps = shape.axes[0].kernel * shape.axes[1].kernel;
  const std::vector<Size> result{"images", "m", "plane"};
  KernelDescription kernel{
      .name = "convolution",
      .tensors = {{.name = "x",
                   .element = shape.given,
                   .sizes = {"images", "all_channels", "height", "width"}},
                  {.name = "w", .element = shape.weight, .sizes = {"m", "depth"}},
                  {.name = "y", .element = shape.given, .access = Access::kWrite, .sizes = result}},
      .constants = {{"taps", taps},
                    {"kernel_x", shape.axes[1].kernel},
                    {"stride_y", shape.axes[0].stride},
                    {"stride_x", shape.axes[1].stride},
                    {"dilation_y", shape.axes[0].dilation},
                    {"dilation_x", shape.axes[1].dilation},
                    {"upsample", shape.upsample}},
      .parameters = {"rows", "m", "channels", "all_channels", "depth", "columns", "plane",
                     "result_width", "height", "width", "head_y", "head_x"}};
  fill_tiled_product({.rows = "args.rows",
                      .depth = "args.depth",
                      .columns = "args.columns",
                      .setup = kSetup,
                      .left = "element = args.w.Read(group(2) * args.rows + row, k);",
                      .right = kWindow,
                      .write = "args.y.Write(sum, column / args.plane, group(2) * args.rows + row, "
                               "column % args.plane);"},
                     kernel);
  std::vector<Link>& links = kernel.links["y"];
  if (shape.has_bias)
    links.push_back({.code = "value += args.bias.Read(at1);",
                     .tensors = {{.name = "bias", .element = shape.given, .sizes = {"m"}}}});
  if (shape.has_residual)
    links.push_back({.code = "value += args.residual.Read(at);",
                     .tensors = {{.name = "residual", .element = shape.given, .sizes = result}}});
  // Written so that NaN stays NaN.
  if (shape.is_relu) links.push_back({.code = "value = value < 0.0f ? 0.0f : value;"});
  return kernel;
}

Grid convolution_grid(const ConvolutionShape& shape, std::int64_t columns) {
  return tiled_product_grid(shape.rows, columns, shape.groups);
}

}  // namespace flownpu::gpu
