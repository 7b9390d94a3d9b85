// SPDX-License-Identifier: Apache-2.0
// The dialect SPIR-V, for Vulkan 1.3: the kernel is a whole module, in binary. Accesses to memory
// are calls load_FORMAT(tensor, index), load4_FORMAT and store_FORMAT, which the compiler emits
// (spirv/memory.h); `index` counts elements of the format.
#include "ops/gpu/language/dialect.h"

#include <array>
#include <charconv>

#include "ops/error.h"
#include "ops/gpu/language/spirv/compiler.h"
#include "ops/gpu/language/text.h"
#include "ops/gpu/language/words.h"

namespace flownpu::gpu {
namespace {

// Functions that OpenCL C has. GLSL's own tanh may be a quotient of two exponentials, which
// overflow; beyond 10 it is 1 in float.
constexpr const char* kFunctions = R"(
int isnan(float value) { return (as_uint(value) & 0x7fffffffu) > 0x7f800000u; }
int isfinite(float value) { return (as_uint(value) & 0x7f800000u) != 0x7f800000u; }
float tanh(float value) {
  const float twice = exp(-2.0f * fmin(fabs(value), 10.0f));
  const float magnitude = (1.0f - twice) / (1.0f + twice);
  const float square = value * value;
  const float small = value * (1.0f + square * (-0.33333334f + square * (0.13333334f - square * 0.053968254f)));
  const float large = value < 0.0f ? -magnitude : magnitude;
  return isnan(value) ? value : square < 0.01f ? small : large;
}
// By the series of 2 artanh((m - 1) / (m + 1)), where m is within a factor of sqrt(2) of 1; its next
// term would be below 2^-28 of the first. ln 2 is in two parts, of which the first times an exponent
// is exact.
float log(float value) {
  const int is_small = value < 1.1754944e-38f;
  const int above = as_int(is_small ? value * 8388608.0f : value) - 0x3f3504f3;
  const float exponent = (float)((above >> 23) - (is_small ? 23 : 0));
  const float m = as_float((above & 0x7fffff) + 0x3f3504f3);
  const float f = (m - 1.0f) / (m + 1.0f);
  const float s = f * f;
  const float tail = s * (0.33333334f + s * (0.2f + s * (0.14285715f + s * 0.11111111f)));
  const float found = (2.0f * f * tail - exponent * 2.1219444e-4f) + 2.0f * f + exponent * 0.693359375f;
  return value > 0.0f ? (isfinite(value) ? found : value) : value == 0.0f ? -INFINITY : NAN;
}
// Polynomials fitted to erf(x) / x in x^2 for x up to 1, and to log(1 - erf(x)) for x up to 4, which
// are right to 7e-8 and 1e-8.
float erf(float value) {
  const float s = value * value;
  const float near = value * (1.1283792f + s * (-0.37612638f + s * (0.11283784f + s * (-0.026865518f +
      s * (0.0052212598f + s * (-8.4872387e-4f + s * (1.1287933e-4f - s * 9.7276343e-6f)))))));
  const float x = fmin(fabs(value), 4.0f);
  const float far = 1.0f - exp(2.4392413e-5f + x * (-1.1288685f + x * (-0.63450879f + x * (-0.10715058f +
      x * (0.024478562f + x * (-0.0039590257f + x * (3.9660980e-4f - x * 1.8284047e-5f)))))));
  return isnan(value) ? value : s < 1.0f ? near : value < 0.0f ? -far : far;
}
)";

std::string variable(const TensorDescription& tensor) { return text_of("tensor_", tensor.name); }

const char* format_of(Element element) {
  switch (element) {
    case Element::kFloat32:
      return "float32";
    case Element::kFloat16:
      return "float16";
    case Element::kBFloat16:
      return "bfloat16";
    case Element::kInt32:
      return "int32";
    case Element::kInt8:
    case Element::kInt8Rows:
      return "int8";
    case Element::kActivation:  // generate() has put its type in its place
    case Element::kQ4NX:
      break;
  }
  return "uint8";
}

class SpirV final : public Dialect {
 public:
  std::string prelude() const override { return ""; }

  std::string kernel(const KernelDescription& description, const std::string& body) const override {
    std::vector<std::string> tensors;
    for (const TensorDescription& tensor : description.arguments()) {
      if (tensor.storage == Storage::kImage)
        fail("[kernel ", description.name, "] expected '", tensor.name,
             "' in a buffer: Vulkan's kernels read no images");
      tensors.push_back(variable(tensor));
    }
    try {
      spirv::Compiler compiler(tensors, description.parameters, description.matrices);
      compiler.compile(text_of(kWords, kFunctions), body);
      return compiler.bytes(description.name, static_cast<std::uint32_t>(description.lanes));
    } catch (const Error& error) {
      fail("[kernel ", description.name, "] ", error.what());
    }
  }

  std::string number(float value) const override { return opencl_c().number(value); }

  std::string read(const TensorDescription& tensor, const std::string& index) const override {
    return load(tensor, "load_", format_of(tensor.element), index);
  }
  std::string read4(const TensorDescription& tensor, const std::string& index) const override {
    return load(tensor, "load4_", "int8", index);
  }
  std::string read_floats(const TensorDescription& tensor,
                          const std::string& index) const override {
    return text_of("convert_float4(", load(tensor, "load4_", format_of(tensor.element), index),
                   ")");
  }
  std::string declare_value(const TensorDescription& tensor,
                            const std::string& value) const override {
    return opencl_c().declare_value(tensor, value);
  }
  std::string write(const TensorDescription& tensor, const std::string& index) const override {
    if (tensor.element == Element::kBFloat16)
      return store(tensor, "uint16", index, "to_bfloat16(value)");
    return store(tensor, format_of(tensor.element), index, "value");
  }
  std::string write_scale(const TensorDescription& tensor,
                          const std::string& offset) const override {
    return text_of(store(tensor, "uint16", text_of(offset, " / 2 - 1"), "0u"), " ",
                   store(tensor, "uint16", text_of(offset, " / 2"), "to_bfloat16(value)"));
  }

  std::string bfloat16(const TensorDescription& weight, const std::string& offset) const override {
    return load(weight, "load_", "bfloat16", text_of("(", offset, ") / 2"));
  }
  std::string bfloat16s(const TensorDescription& weight, const std::string& offset) const override {
    return load(weight, "load8_", "bfloat16", text_of("(", offset, ") / 2"));
  }
  std::string four_words(const TensorDescription& weight,
                         const std::string& offset) const override {
    return load(weight, "load4_", "uint32", text_of("(", offset, ") / 4"));
  }
  std::string signed_byte(const TensorDescription& weight,
                          const std::string& offset) const override {
    return load(weight, "load_", "int8", offset);
  }
  std::string code(const TensorDescription& weight, const std::string& offset,
                   const std::string& row) const override {
    const std::string two = text_of(offset, " + ", row, " % 16 / 2");
    return text_of("((", load(weight, "load_", "uint8", two), " >> (4 * (", row, " % 2))) & 15)");
  }

 private:
  static std::string load(const TensorDescription& tensor, const char* word, const char* format,
                          const std::string& index) {
    return text_of(word, format, "(", variable(tensor), ", ", index, ")");
  }
  static std::string store(const TensorDescription& tensor, const char* format,
                           const std::string& index, const char* value) {
    return text_of("store_", format, "(", variable(tensor), ", ", index, ", ", value, ");");
  }
};

}  // namespace

const Dialect& spirv_for_vulkan() {
  static const SpirV dialect;
  return dialect;
}

}  // namespace flownpu::gpu
