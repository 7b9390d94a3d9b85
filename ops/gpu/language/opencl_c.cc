// SPDX-License-Identifier: Apache-2.0
// The dialect OpenCL C 1.2, with arithmetic in float. Dot products of char4 use the device's own
// instruction where its compiler offers one (cl_khr_integer_dot_product in OpenCL C 3.0; on NVIDIA
// GPUs since 2016 inline assembly), else multiplications in int, with the same results. Vectors are
// read through pointers to types that are aligned to their size, which is one load: vloadn promises
// no alignment, and some compilers make a load for each element of it.
#include <array>
#include <charconv>

#include "ops/gpu/language/dialect.h"
#include "ops/gpu/language/image.h"
#include "ops/gpu/language/text.h"
#include "ops/gpu/language/words.h"

namespace flownpu::gpu {
namespace {

constexpr const char* kPrelude = R"(#define group(axis) ((int)get_group_id(axis))
#define lane() ((int)get_local_id(0))
#define shared __local
#define synchronise() barrier(CLK_LOCAL_MEM_FENCE)
#define unrolled _Pragma("unroll")
float4 four_from_bfloat16(ushort4 bits) { return as_float4(convert_uint4(bits) << 16); }
float8 from_bfloat16s(ushort8 bits) { return as_float8(convert_uint8(bits) << 16); }
uint8 looked_up(uint4 table, uint8 places) {
  const uchar16 values = as_uchar16(table);
  return (uint8)(as_uint4(shuffle(values, as_uchar16(places.lo))),
                 as_uint4(shuffle(values, as_uchar16(places.hi))));
}
#ifdef __opencl_c_integer_dot_product_input_4x8bit_packed
int dot4(char4 a, char4 b, int c) { return c + dot_4x8packed_ss_int(as_uint(a), as_uint(b)); }
#elif defined(__NV_CL_C_VERSION)
int dot4(char4 a, char4 b, int c) {
  int sum;
  asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(as_int(a)), "r"(as_int(b)), "r"(c));
  return sum;
}
#else
int dot4(char4 a, char4 b, int c) {
  const int4 products = convert_int4(a) * convert_int4(b);
  return c + products.x + products.y + products.z + products.w;
}
#endif
)";

const char* type_of(Element element) {
  switch (element) {
    case Element::kFloat32:
      return "float";
    case Element::kFloat16:
      return "half";
    case Element::kBFloat16:
      return "ushort";
    case Element::kInt32:
      return "int";
    case Element::kInt8:
    case Element::kInt8Rows:
      return "char";
    case Element::kActivation:  // generate() has put its type in its place
    case Element::kQ4NX:
      break;
  }
  return "uchar";
}

// A name of its own, since the kernel's text may have a variable with the tensor's name.
std::string variable(const TensorDescription& tensor) { return text_of("tensor_", tensor.name); }

bool is_integer(Element element) {
  return element == Element::kInt32 || element == Element::kInt8 || element == Element::kInt8Rows;
}

class OpenClC final : public Dialect {
 public:
  std::string prelude() const override { return text_of(kWords, kPrelude); }

  std::string kernel(const KernelDescription& description, const std::string& body) const override {
    std::string arguments;
    bool has_images = false;
    const auto add = [&](const std::string& argument) {
      arguments += (arguments.empty() ? "" : ", ") + argument;
    };
    for (const TensorDescription& tensor : description.arguments()) {
      has_images = has_images || tensor.storage == Storage::kImage;
      add(text_of(type_of_argument(tensor), variable(tensor)));
    }
    for (const std::string& parameter : description.parameters)
      add(text_of("const int ", parameter));
    return text_of(has_images ? image::functions() : "",
                   "__kernel __attribute__((reqd_work_group_size(", description.lanes,
                   ", 1, 1)))\nvoid ", description.name, "(", arguments, ") {\n", body, "}\n");
  }

  // In hexadecimal, which is exact.
  std::string number(float value) const override {
    std::array<char, 64> text{};
    const auto end = std::to_chars(text.data(), text.data() + text.size(),
                                   value < 0 ? -value : value, std::chars_format::hex)
                         .ptr;
    return text_of(value < 0 ? "-" : "", "0x", std::string(text.data(), end), "f");
  }

  std::string read(const TensorDescription& tensor, const std::string& index) const override {
    if (tensor.element == Element::kFloat16)
      return text_of("vload_half(", index, ", ", variable(tensor), ")");
    const std::string element = element_of(tensor, index);
    if (tensor.element == Element::kBFloat16) return text_of("from_bfloat16(", element, ")");
    return is_integer(tensor.element) ? text_of("((int)", element, ")") : element;
  }

  std::string read4(const TensorDescription& tensor, const std::string& index) const override {
    return text_of("*(__global const char4*)(", variable(tensor), " + ", index, ")");
  }

  // Through types that are aligned to their size: vload4 promises no alignment, and may be four
  // loads.
  std::string read_floats(const TensorDescription& tensor,
                          const std::string& index) const override {
    const std::string place = text_of("(", variable(tensor), " + ", index, ")");
    if (tensor.element == Element::kFloat16) return text_of("vloada_half4(0, ", place, ")");
    const auto as = [&](const char* type) {
      return text_of("*(__global const ", type, "*)", place);
    };
    if (tensor.element == Element::kBFloat16)
      return text_of("four_from_bfloat16(", as("ushort4"), ")");
    return is_integer(tensor.element) ? text_of("convert_float4(", as("char4"), ")")
                                      : text_of("(", as("float4"), ")");
  }

  std::string declare_value(const TensorDescription& tensor,
                            const std::string& value) const override {
    return text_of(is_integer(tensor.element) ? "int" : "float", " value = ", value);
  }

  std::string write(const TensorDescription& tensor, const std::string& index) const override {
    if (tensor.element == Element::kFloat16)
      return text_of("vstore_half_rte(value, ", index, ", ", variable(tensor), ");");
    const std::string element = element_of(tensor, index);
    if (tensor.element == Element::kBFloat16) return text_of(element, " = to_bfloat16(value);");
    return text_of(element, " = (", type_of(tensor.element), ")value;");
  }

  std::string write_scale(const TensorDescription& tensor,
                          const std::string& offset) const override {
    const std::string upper = text_of("(__global ushort*)(", variable(tensor), " + ", offset, ")");
    return text_of("(", upper, ")[-1] = 0; *", upper, " = to_bfloat16(value);");
  }

  std::string bfloat16(const TensorDescription& weight, const std::string& offset) const override {
    return text_of("from_bfloat16(", bytes_of(weight, "ushort", offset), ")");
  }
  std::string bfloat16s(const TensorDescription& weight, const std::string& offset) const override {
    return text_of("from_bfloat16s(", bytes_of(weight, "ushort8", offset), ")");
  }
  std::string four_words(const TensorDescription& weight,
                         const std::string& offset) const override {
    return bytes_of(weight, "uint4", offset);
  }
  std::string signed_byte(const TensorDescription& weight,
                          const std::string& offset) const override {
    return text_of("as_char(", bytes_of(weight, "uchar", offset), ")");
  }
  std::string code(const TensorDescription& weight, const std::string& offset,
                   const std::string& row) const override {
    const std::string two = text_of(offset, " + ", row, " % 16 / 2");
    return text_of("((", bytes_of(weight, "uchar", two), " >> (4 * (", row, " % 2))) & 15)");
  }

 private:
  static std::string element_of(const TensorDescription& tensor, const std::string& index) {
    return text_of(variable(tensor), "[", index, "]");
  }
  static std::string type_of_argument(const TensorDescription& tensor) {
    if (tensor.storage == Storage::kImage) return image::type();
    return text_of("__global ", tensor.access == Access::kRead ? "const " : "",
                   type_of(tensor.element), "* restrict ");
  }
  // The bytes at an offset as one `type`, which is uchar, ushort, ushort8 or uint4.
  static std::string bytes_of(const TensorDescription& weight, const std::string& type,
                              const std::string& offset) {
    if (weight.storage == Storage::kImage) return image::read(type, variable(weight), offset);
    return text_of("*(__global const ", type, "*)(", variable(weight), " + ", offset, ")");
  }
};

}  // namespace

const Dialect& opencl_c() {
  static const OpenClC dialect;
  return dialect;
}

}  // namespace flownpu::gpu
