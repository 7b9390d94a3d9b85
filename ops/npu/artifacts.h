// SPDX-License-Identifier: Apache-2.0
// Artifacts: the folder of compiled designs that `flownpu build` makes, as the host reads it.
//
// `index.words` (aie/artifact_index.py writes it) lists the arrays and, for each call, its
// operator, its attributes and its host buffers. The words of a call are a family (call_family.h).
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ops/npu/call_family.h"

namespace flownpu::npu {

// What tells a call from others of its operator: lists of integers; floats as their bits.
using CallAttributes = std::map<std::string, std::vector<std::int64_t>, std::less<>>;

// A float as the index has it: its bits.
inline std::int64_t bits_of(float value) { return std::bit_cast<std::int32_t>(value); }

struct ArrayRecord {
  std::string name;
  std::string file;  // relative to the folder
  std::int64_t crc = 0;
};

struct BufferRecord {
  std::string name;
  std::size_t bytes = 0;
};

struct CallRecord {
  std::string op_type;  // stem of the design: "decode_layer", "gemm", ...
  std::string name;
  CallAttributes attributes;
  std::size_t array = 0;
  std::string file;  // of the family
  std::int64_t crc = 0;
  std::vector<BufferRecord> buffers;  // in the order of the call's arguments
};

class Artifacts {
 public:
  // `emulated`: whether its arrays are to be plans for the emulator rather than xclbins. Throws
  // DeviceError (kArtifact) if there is no such folder, it was built for the other, or its index is
  // damaged: it says how to build it.
  Artifacts(std::string folder, bool emulated);

  const std::string& folder() const { return folder_; }
  // "npu1", "npu2".
  const std::string& target() const { return target_; }
  bool emulated() const { return emulated_; }
  // What they were built of: changes when any file does.
  const std::string& identity() const { return identity_; }

  const ArrayRecord& array(std::size_t number) const { return arrays_[number]; }
  // All calls of an operator whose attributes include these.
  std::vector<const CallRecord*> find(std::string_view op_type,
                                      const CallAttributes& attributes) const;
  // The one call of these; DeviceError (kArtifact) that says what there is of that operator, and
  // how to build what is missing.
  const CallRecord& require(std::string_view op_type, const CallAttributes& attributes) const;
  // The path of the call's array, and its words; both are checked against their sums. Throw
  // DeviceError (kArtifact).
  std::string array_file(const CallRecord& call) const;
  CallFamily family(const CallRecord& call) const;
  // `flownpu build` for these: what a message tells the user to type.
  std::string build_command() const;
  // Throws DeviceError (kArtifact): why, what to do, and the command for it.
  [[noreturn]] void refuse(const std::string& why, const std::string& what_to_do) const;

 private:
  void read_index(std::span<const std::int64_t> words);
  // The path of a file of the folder, which has this sum.
  std::string checked(const std::string& file, std::int64_t sum) const;

  std::string folder_;
  std::string target_;
  std::string identity_;
  bool emulated_ = false;
  std::vector<ArrayRecord> arrays_;
  std::vector<CallRecord> calls_;
};

}  // namespace flownpu::npu
