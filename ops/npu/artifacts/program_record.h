// SPDX-License-Identifier: Apache-2.0
// A program in the index of artifacts: the host's actions for a prompt, a token or an image.
// aie/programs/program.py writes it, and documents its numbers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "aie/words/reader.h"
#include "ops/nodes/node.h"

namespace flownpu::npu {

struct BufferRecord {
  std::string name;
  std::size_t bytes = 0;
};

struct CallRecord {
  std::string op_type;  // stem of the design: "decode_layer", "gemm", ...
  std::string name;
  std::size_t array = 0;
  std::string file;  // the file of the family
  std::int64_t crc = 0;
  std::vector<BufferRecord> buffers;  // in the order of the call's arguments
};

// An operator that the host computes (run/host_operators.h).
struct HostCallRecord {
  std::string op_type;
  // Sizes, and floats as their bits.
  std::map<std::string, std::vector<std::int64_t>, std::less<>> parameters;
  std::vector<BufferRecord> buffers;  // in the order of its arguments
};

// A part of one of the program's buffers.
struct ViewRecord {
  std::size_t buffer = 0;
  std::size_t offset = 0;
  std::size_t bytes = 0;
};

// Rows of bf16 that the host writes or reads: `columns` elements each, which begin `line` elements
// apart.
struct RowsRecord {
  ViewRecord view;
  std::size_t columns = 0;
  std::size_t line = 0;

  std::size_t rows() const { return view.bytes / (line * sizeof(std::uint16_t)); }
};

struct StepRecord {
  std::size_t call = 0;  // its number in the index, among the arrays' calls or the host's
  std::string label;     // for messages
  // The distance in tokens from the run's first token to the call's first one.
  std::int64_t offset = 0;
  // The buffer whose first numbers (int32) are the call's choices (call_family.h).
  std::optional<std::size_t> choices;
  std::vector<ViewRecord> views;
};

// Steps that go together: calls over one array, or steps of the host.
struct DispatchRecord {
  bool host = false;
  std::vector<StepRecord> steps;
};

// The places of keys and values in a KV cache by layer, position and KV head. Each member is the
// distance in bytes to the next one; `value` is the distance from a key to its value. The positions
// of a layer follow one another, each with all its heads. `int8_rows`: the offset of the same keys
// and values in int8, rows of 5 / 4 bytes an element in the same order (ops/nodes/kv_cache.h, and
// padding); 0: there are none.
struct CacheLayout {
  std::size_t layer = 0;
  std::size_t position = 0;
  std::size_t head = 0;
  std::size_t value = 0;
  std::size_t int8_rows = 0;

  bool operator==(const CacheLayout&) const = default;
};

// Neighbouring values that share an exponent when XDNA2 multiplies them (bfp16ebs8: eight numbers,
// aie/kernels/common/attention.h). The positions after the last key, up to a multiple of this
// number, must be zeros, because larger numbers would change the rounding of neighbouring values.
inline constexpr std::size_t kPositionsOfExponent = 8;
// How many positions are to be written for `keys` keys, in a cache of `context` positions.
inline std::size_t with_zeros(std::size_t keys, std::size_t context) {
  const std::size_t end =
      (keys + kPositionsOfExponent - 1) / kPositionsOfExponent * kPositionsOfExponent;
  return end < context ? end : context;
}

enum class BufferRole : std::uint8_t { kConstant, kCache, kScratch, kHost };

struct ProgramBuffer {
  std::string name;
  BufferRole role = BufferRole::kScratch;
  std::size_t bytes = 0;
  // The buffer begins with zeros; if `line` is not 0, with ones at the elements `one`, one + line,
  // ...
  std::size_t line = 0;
  std::size_t one = 0;
};

struct ProgramRecord {
  std::string kind;  // "decode", "prefill", "block", "encode"; or an operator's stem
  // Attributes of the model's node that the program is for; floats as their bits, texts as their
  // bytes.
  std::map<std::string, std::vector<std::int64_t>, std::less<>> attributes;
  std::int64_t tokens = 0;
  std::int64_t fewest = 0;  // the fewest tokens for which the program is worth its time
  std::int64_t context = 0;
  CacheLayout cache;
  std::vector<ProgramBuffer> buffers;
  RowsRecord given;  // written before a run
  RowsRecord made;   // the part that is read after the program; nothing if it has no bytes
  std::vector<DispatchRecord> dispatches;

  // How many dispatches go to an array.
  std::size_t array_dispatches() const;

  // Describes the first of the program's attributes that the node lacks, or has with another value;
  // "" if there is none.
  std::string difference(const Node& node) const;
};

// Throws words::Error if a number is out of range, such as a view that exceeds its buffer.
ProgramRecord read_program(words::WordReader& reader, std::span<const CallRecord> calls,
                           std::span<const HostCallRecord> host_calls);

}  // namespace flownpu::npu
