// SPDX-License-Identifier: Apache-2.0
// Artifacts: the folder of compiled designs that `flownpu build` writes, as the host reads it.
//
// `index.words` (written by aie/artifacts/index.py) lists the arrays, the calls with their host
// buffers, the host's calls, and the programs (program_record.h). The words of a call are in a file
// of their own, a family (call_family.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ops/npu/artifacts/call_family.h"
#include "ops/npu/artifacts/program_record.h"

namespace flownpu::npu {

struct ArrayRecord {
  std::string name;
  std::string file;  // relative to the folder
  std::int64_t crc = 0;
};

class Artifacts {
 public:
  // Whether a folder has artifacts, valid or not.
  static bool are_in(const std::string& folder);

  // `emulated`: whether the arrays must be plans for the emulator rather than xclbins. Throws
  // DeviceError (kArtifact), which says how to build the folder, if the folder is missing, was
  // built for the other kind, or has a damaged index.
  Artifacts(std::string folder, bool emulated);

  const std::string& folder() const { return folder_; }
  // "npu1", "npu2".
  const std::string& target() const { return target_; }
  bool emulated() const { return emulated_; }
  // A digest of the sources of the folder. It changes when any file does.
  const std::string& identity() const { return identity_; }

  const ArrayRecord& array(std::size_t number) const { return arrays_[number]; }
  const CallRecord& call(std::size_t number) const { return calls_[number]; }
  const HostCallRecord& host_call(std::size_t number) const { return host_calls_[number]; }
  // Whether there are programs of a kind, for any model.
  bool has(std::string_view kind) const;
  // The programs of a kind for the model of this node, those for the fewest tokens first.
  std::vector<const ProgramRecord*> programs(std::string_view kind, const Node& node) const;
  // The same, but at least one. Throws DeviceError (kArtifact) that says for which models there are
  // programs, and how to build the missing ones.
  std::vector<const ProgramRecord*> require(std::string_view kind, const Node& node) const;
  // Two files of a call: its array's path, and its words. Both files are compared with their
  // checksums. Throw DeviceError (kArtifact).
  std::string array_file(const CallRecord& call) const;
  CallFamily family(const CallRecord& call) const;
  // Checks all files of these programs' calls. Throws as those two do.
  void check(std::span<const ProgramRecord* const> programs) const;
  // The `flownpu build` command that makes these artifacts, for messages.
  std::string build_command() const;
  // Throws DeviceError (kArtifact) with the reason, what to do, and the command for it.
  [[noreturn]] void refuse(const std::string& why, const std::string& what_to_do) const;

 private:
  void read_index(std::span<const std::int64_t> words);
  // The path of a file of the folder, after its checksum was compared with `sum`.
  std::string checked(const std::string& file, std::int64_t sum) const;

  std::string folder_;
  std::string target_;
  std::string identity_;
  bool emulated_ = false;
  std::vector<ArrayRecord> arrays_;
  std::vector<CallRecord> calls_;
  std::vector<HostCallRecord> host_calls_;
  std::vector<ProgramRecord> programs_;
};

}  // namespace flownpu::npu
