// SPDX-License-Identifier: Apache-2.0
// A program as the index of artifacts has it: what the host does for a prompt, a token or an image
// (aie/programs/program.py, which says what each number means, writes it).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
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
  std::string file;  // of the family
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

// Rows of bf16 that the host writes or reads: `columns` elements, `line` from one to the next.
struct RowsRecord {
  ViewRecord view;
  std::size_t columns = 0;
  std::size_t line = 0;

  std::size_t rows() const { return view.bytes / (line * sizeof(std::uint16_t)); }
};

struct StepRecord {
  std::size_t call = 0;  // its number in the index, among arrays' or the host's
  std::string label;     // for messages
  // Tokens from the run's first one to that of the call.
  std::int64_t offset = 0;
  std::vector<ViewRecord> views;
};

// Steps over one array, or of the host.
struct DispatchRecord {
  bool host = false;
  std::vector<StepRecord> steps;
};

// Where a KV cache has the key and the value of a layer, position and KV head: bytes from each to
// the next. The positions of a layer follow one another, each with all its heads.
struct CacheLayout {
  std::size_t layer = 0;
  std::size_t position = 0;
  std::size_t head = 0;
  std::size_t value = 0;

  bool operator==(const CacheLayout&) const = default;
};

// Neighbours whose values share an exponent where XDNA2 multiplies them (bfp16ebs8: eight numbers,
// aie/kernels/common/attention.h). So the positions that follow the last key, up to a multiple of these,
// are zeros: what a cache had there before would decide how the values beside it are rounded.
inline constexpr std::size_t kPositionsOfExponent = 8;
// The positions that are to be written for `keys`, in a cache of `context`.
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
  // It begins as zeros, and with a line as ones at the elements `one`, one + line, ...
  std::size_t line = 0;
  std::size_t one = 0;
};

struct ProgramRecord {
  std::string kind;  // "decode", "prefill", "encode"
  // Attributes of the model's node that it is for; floats as their bits, texts as their bytes.
  std::map<std::string, std::vector<std::int64_t>, std::less<>> attributes;
  std::int64_t tokens = 0;
  std::int64_t fewest = 0;  // tokens for which it is worth its time
  std::int64_t context = 0;
  CacheLayout cache;
  std::vector<ProgramBuffer> buffers;
  RowsRecord given;  // written before a run
  RowsRecord made;   // read after it; none without bytes
  std::vector<DispatchRecord> dispatches;

  // That go to an array.
  std::size_t array_dispatches() const;

  // The first program's attribute that the node has not, or has otherwise; "" if there is none.
  std::string difference(const Node& node) const;
};

// Throws words::Error if a number is out of its range: a view ends with its buffer.
ProgramRecord read_program(words::WordReader& reader, std::span<const CallRecord> calls,
                           std::span<const HostCallRecord> host_calls);

}  // namespace flownpu::npu
