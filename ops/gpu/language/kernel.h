// SPDX-License-Identifier: Apache-2.0
// The language of GPU kernels, after ML Drift's tensor virtualisation: a kernel is text that names
// its tensors and their logical coordinates, and a description of each tensor says what holds it.
// From both, generate() (generate.h) makes source in a dialect.
//
// The text is C with these words:
//   args.x.Read(i, j)             an element: int of integers, float of float, bf16 and f16; of
//                                 int8 rows scale * code, a float
//   args.x.Read4(i, j)            char4: four along the last axis, j a multiple of 4 (int8 only)
//   args.x.ReadFloats(i, j)       float4: four along the last axis, the values that Read gives; j
//                                 and the axis's size are multiples of 4, so that one load of 4
//                                 elements is enough
//   args.y.Write(value, i, j);    a statement; links of y (Link) are applied to `value` first; of
//                                 int8 rows it is a code
//   args.y.WriteScale(value, i);  of int8 rows: a statement; the scale of row i, which bf16 holds
//   args.w.Scale(row, group), args.w.Minimum(row, group)
//                                 of a Q4NX weight (ops/formats/q4nx.h), float
//   args.w.Scales(row, group), args.w.Minima(row, group)
//                                 of the 8 rows from `row` on, a multiple of 8: float8
//   args.w.CodePairs(row, column) uint4: codes of the 16 rows from `row` on, a multiple of 16, in
//                                 two columns: `column`, which is even, in .x and .y, and the next
//                                 one in .z and .w. As in memory, a byte has two rows, the even one
//                                 in its low nibble
//   args.w.EvenCodes(row, column), args.w.OddCodes(row, column)
//                                 uint8: the values of codes of the even, or odd, ones of the 16
//                                 rows from `row` on, a multiple of 16; a word has four columns
//                                 from `column` on, a multiple of 4, in bytes: of 0 to 15, or of 8
//                                 bits and of tables int8
//   args.n                        a constant, written as a number; or a parameter of the launch
//   group(axis), lane()           the work-group, and the work-item in it
//   shared float a[args.n];       memory of a work-group; synchronise(): its lanes wait for one
//                                 another
//   unrolled for (...)            a loop of a constant number of rounds, written out: arrays that
//                                 it indexes can be registers
//   rounded_to_half(x)            float: the nearest number that float16 holds
//   dot4(a, b, c)                 int: c + the dot product of two char4
//   transposed(four)              uint4: the bytes of a uint4 as a 4 x 4 matrix, transposed: byte
//                                 i of word j is byte j of word i
// With matrix units (MatrixUnits), for which all lanes of a subgroup do the same:
//   subgroup()                    the number of the lane's subgroup in the work-group
//   left_matrix, right_matrix, sum_matrix
//                                 types of variables
//   matrix_of(value)              sum_matrix: all elements are this number
//   left_from(a, place, stride), right_from(a, place, stride)
//                                 of an array of the work-group: rows of the left factor, columns
//                                 of the right one, each of neighbouring elements from the index
//                                 `place` on, `stride` indices behind the one before
//   sum_from(a, place, stride)    of an array of float: the columns of a sum_matrix, likewise
//   multiplied(left, right, sum)  sum + left right
//   scaled(sum, factors)          each element of a sum_matrix times that of another one
//   to_array(sum, a, place, stride);
//                                 a statement; the columns of the sum, likewise
//   halves(a, b)                  uint: two numbers as float16, a in the lower half; rounded to a
//                                 nearest one, below or above
// and float4, float8, uchar16, char4, uint4, int4 and C's functions as OpenCL C has them (dialect.h
// says what a dialect must give).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "ops/formats/q4nx.h"

namespace flownpu::gpu {

// kInt8Rows: a row of an int8 KV cache, the codes of its elements and behind them their scale
// (ops/nodes/flow_qkv_attention.h); rows have an even number of elements. kActivation: values that
// one kernel writes for the next; generate() is told their type.
enum class Element : std::uint8_t {
  kFloat32,
  kFloat16,
  kBFloat16,
  kInt32,
  kInt8,
  kQ4NX,
  kInt8Rows,
  kActivation,
};
enum class Access : std::uint8_t { kRead, kWrite };
// The storage of a tensor: memory, or an image of the same bytes (image.h). Only a Q4NX weight that
// is read may be an image.
enum class Storage : std::uint8_t { kBuffer, kImage };

// A number, or the name of a parameter, for a size that is not known before the launch.
using Size = std::variant<std::int64_t, std::string>;

// A logical tensor, row-major in what holds it; a Q4NX weight [rows, columns] in its blocks.
struct TensorDescription {
  std::string name;
  Element element = Element::kFloat32;
  Access access = Access::kRead;
  std::vector<Size> sizes;
  q4nx::Layout layout = q4nx::kNarrow;
  Storage storage = Storage::kBuffer;
};

// An element-wise step that is fused into the kernel which writes its input. The code changes the
// variable `value`, the element at coordinates `at`: that word stands for all of them, at0 is the
// first, at1 the second, ...
struct Link {
  std::string code;
  std::vector<TensorDescription> tensors = {};
};

// Numbers that are written into the source, by their names.
using Constants = std::map<std::string, std::variant<std::int64_t, float>>;

// A GPU's matrix units, as far as kernels use them: a subgroup of so many lanes multiplies a matrix
// of float16 [rows, depth] by one [depth, columns], and adds the products to one of float32.
struct MatrixUnits {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t depth = 0;
  std::int64_t lanes = 0;
  std::string text() const {
    return std::to_string(rows) + " x " + std::to_string(columns) + " x " + std::to_string(depth) +
           " in " + std::to_string(lanes) + " lanes";
  }
};

struct KernelDescription {
  std::string name;
  std::string body = {};
  std::vector<TensorDescription> tensors = {};
  Constants constants = {};
  // Names of 32-bit integers that each launch gives.
  std::vector<std::string> parameters = {};
  // Work-items of a work-group: args.lanes.
  std::int64_t lanes = 64;
  // The steps that are linked to an output, by the tensor's name.
  std::map<std::string, std::vector<Link>> links = {};
  // The matrix units of a kernel that has words for them, which needs Vulkan.
  std::optional<MatrixUnits> matrices = std::nullopt;

  // All tensors, in the order of a launch's arguments: the kernel's, then its links'. The
  // parameters follow them.
  std::vector<TensorDescription> arguments() const {
    std::vector<TensorDescription> all = tensors;
    for (const auto& [name, steps] : links)
      for (const Link& step : steps)
        all.insert(all.end(), step.tensors.begin(), step.tensors.end());
    return all;
  }
};

}  // namespace flownpu::gpu
