// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/decoder/stored_type.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <span>
#include <vector>

#include "ops/error.h"
#include "ops/formats/numbers.h"
#include "ops/gpu/language/generate.h"

namespace flownpu::gpu {
namespace {

constexpr std::size_t kHalves = 65536;
constexpr std::int64_t kLanes = 64;

struct Halves {
  std::vector<std::uint16_t> all;
  std::vector<float> middles;
};

// A middle lies between a number and the next one away from zero. It takes 12 bits, and is a tie.
// For the largest number it is the value from which on numbers round to infinity. Infinities and
// NaN stand for themselves.
Halves make_halves() {
  Halves made;
  for (std::size_t code = 0; code < kHalves; ++code) {
    const auto bits = static_cast<std::uint16_t>(code);
    made.all.push_back(bits);
    const float value = from_half(bits);
    constexpr std::uint16_t kLargest = 0x7bff;
    constexpr float kTie = 65520;  // the middle of 65504 and 2^16
    if ((bits & 0x7fffU) < kLargest)
      made.middles.push_back((value + from_half(static_cast<std::uint16_t>(bits + 1))) / 2);
    else
      made.middles.push_back(std::isfinite(value) ? std::copysign(kTie, value) : value);
  }
  return made;
}

// Equal to the bit, or both NaN.
bool same(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) ||
         std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

template <typename Number>
Buffer written(Context& context, const std::vector<Number>& content) {
  Buffer buffer = context.allocate(content.size() * sizeof(Number));
  context.write(buffer, std::as_bytes(std::span(content)));
  return buffer;
}

std::int64_t count_wrong(Context& context, const KernelDescription& kernel) {
  const Halves given = make_halves();
  std::vector<float> floats(kHalves);
  std::vector<std::uint16_t> rounded(kHalves);
  const Buffer halves = written(context, given.all);
  const Buffer middles = written(context, given.middles);
  const Buffer to_floats = written(context, floats);
  const Buffer to_halves = written(context, rounded);
  const std::array<KernelArgument, 4> arguments{&halves, &to_floats, &middles, &to_halves};
  context.launch(
      *context.compile(kernel), arguments,
      {.groups = {static_cast<std::int64_t>(kHalves) / kernel.lanes, 1, 1}, .lanes = kernel.lanes});
  context.read(to_floats, std::as_writable_bytes(std::span(floats)));
  context.read(to_halves, std::as_writable_bytes(std::span(rounded)));
  std::int64_t wrong = 0;
  for (std::size_t i = 0; i < kHalves; ++i) {
    if (!same(floats[i], from_half(given.all[i]))) ++wrong;
    if (!same(from_half(rounded[i]), from_half(to_half(given.middles[i])))) ++wrong;
  }
  return wrong;
}

}  // namespace

KernelDescription convert_halves() {
  const std::vector<Size> all{static_cast<std::int64_t>(kHalves)};
  return {.name = "convert_halves",
          .body = R"(
  const int i = group(0) * args.lanes + lane();
  args.floats.Write(args.halves.Read(i), i);
  args.rounded.Write(args.middles.Read(i), i);
)",
          .tensors = {{.name = "halves", .element = Element::kFloat16, .sizes = all},
                      {.name = "floats", .access = Access::kWrite, .sizes = all},
                      {.name = "middles", .sizes = all},
                      {.name = "rounded",
                       .element = Element::kFloat16,
                       .access = Access::kWrite,
                       .sizes = all}},
          .lanes = kLanes};
}

std::int64_t wrong_halves(Context& context, const KernelDescription& kernel) {
  const std::string key =
      context.identity() + "wrong conversions of:\n" + generate(kernel, context.dialect());
  std::int64_t wrong = 0;
  if (const auto kept = context.cache().find(key); kept && kept->size() == sizeof(wrong)) {
    std::memcpy(&wrong, kept->data(), sizeof(wrong));
    return wrong;
  }
  wrong = count_wrong(context, kernel);
  std::vector<unsigned char> bytes(sizeof(wrong));
  std::memcpy(bytes.data(), &wrong, sizeof(wrong));
  context.cache().keep(key, bytes);
  return wrong;
}

std::string StoredType::text() const {
  return (element == Element::kFloat16 ? "fp16 (" : "fp32 (") + why + ")";
}

StoredType stored_type_of(const DeviceFacts& facts, GpuDtype wanted,
                          const std::function<std::int64_t()>& wrong) {
  if (wanted == GpuDtype::kFloat32) return {Element::kFloat32, "gpu_dtype = fp32"};
  if (wanted == GpuDtype::kAuto && !facts.has_half)
    return {Element::kFloat32, "the device does not compute in half precision"};
  const std::int64_t count = wrong();
  if (wanted == GpuDtype::kAuto && count > 0)
    return {Element::kFloat32,
            "the driver converts " + std::to_string(count) + " of 131072 numbers wrongly"};
  if (count > 0)
    fail(
        "[FlowNPU] device 'gpu': expected a driver that converts to and from float16 as IEEE 754 "
        "says, which gpu_dtype = fp16 asks for, got ",
        count, " of 131072 numbers wrong on ", facts.title(), ", driver ", facts.driver,
        ": update the driver, or use gpu_dtype = fp32");
  return {Element::kFloat16, wanted == GpuDtype::kAuto
                                 ? "the device computes in half precision, and converts rightly"
                                 : "gpu_dtype = fp16"};
}

StoredType choose_stored_type(Context& context, GpuDtype wanted) {
  return stored_type_of(context.facts(), wanted,
                        [&] { return wrong_halves(context, convert_halves()); });
}

}  // namespace flownpu::gpu
