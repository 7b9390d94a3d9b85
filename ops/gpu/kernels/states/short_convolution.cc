// SPDX-License-Identifier: Apache-2.0
// A lane has a channel of a token, so neighbours read neighbours. The state's rows are those of the
// last tokens; where there are fewer tokens than it has rows, its older rows move up.
#include "ops/gpu/kernels/pieces.h"
#include "ops/gpu/kernels/states/kernels.h"

namespace flownpu::gpu {
namespace {

constexpr std::int64_t kLanes = 64;

// GIVEN(row) is what the convolution reads.
constexpr const char* kBody = R"(
  const int channel = group(0) * args.lanes + lane();
  const int token = group(1);
  const int sequence = group(2);
  const int first_row = args.first + sequence * args.tokens;
  if (channel < args.channels) {
    float sum = 0.0f;
    for (int tap = 0; tap < args.taps; ++tap) {
      const int at = token + tap - args.rows;
      float element;
      if (at < 0) {
        element = args.before.Read(sequence, at + args.rows, channel);
      } else {
        element = GIVEN(first_row + at);
      }
      sum += args.weight.Read(channel, tap) * element;
    }
    args.y.Write(RESULT, first_row + token, channel);
    const int kept = token + args.rows - args.tokens;
    if (kept >= 0) args.behind.Write(GIVEN(first_row + token), sequence, kept, channel);
    if (token == 0) {
      for (int row = 0; row < args.rows - args.tokens; ++row)
        args.behind.Write(args.before.Read(sequence, row + args.tokens, channel), sequence, row, channel);
    }
  }
)";

}  // namespace

KernelDescription short_convolution(const ShortConvolutionShape& shape) {
  const std::string tokens = "all_tokens";
  const std::string sequences = "sequences";
  const std::int64_t rows = shape.taps - 1;
  std::string body = kBody;
  for (const char* row : {"first_row + at", "first_row + token"}) {
    const std::string x = std::string("args.x.Read(").append(row).append(", channel");
    std::string given = std::string(x).append(")");
    if (shape.is_gated) given.append(" * ").append(x).append(" + 2 * args.channels)");
    body = replaced(body, std::string("GIVEN(").append(row).append(")"), given);
  }
  return {
      .name = "short_convolution",
      .body =
          replaced(body, "RESULT",
                   shape.is_gated  ? "args.x.Read(first_row + token, channel + args.channels) * sum"
                   : shape.is_silu ? "sum / (1.0f + exp(-sum))"
                                   : "sum"),
      .tensors = {{.name = "x", .element = Element::kActivation, .sizes = {tokens, shape.columns}},
                  {.name = "weight", .sizes = {shape.channels, shape.taps}},
                  {.name = "before", .sizes = {sequences, rows, shape.channels}},
                  {.name = "y",
                   .element = Element::kActivation,
                   .access = Access::kWrite,
                   .sizes = {tokens, shape.channels}},
                  {.name = "behind",
                   .access = Access::kWrite,
                   .sizes = {sequences, rows, shape.channels}}},
      .constants = {{"channels", shape.channels}, {"taps", shape.taps}, {"rows", rows}},
      .parameters = {"first", "tokens"},
      .lanes = kLanes};
}

Grid short_convolution_grid(const ShortConvolutionShape& shape, std::int64_t tokens,
                            std::int64_t sequences) {
  return {.groups = {q4nx::ceil_div(shape.channels, kLanes), tokens, sequences}, .lanes = kLanes};
}

}  // namespace flownpu::gpu
