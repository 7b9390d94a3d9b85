// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/artifacts/index.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <system_error>
#include <utility>

#include "aie/words/reader.h"
#include "ops/formats/crc32.h"
#include "ops/npu/driver/runtime.h"
#include "ops/system/paths.h"

namespace flownpu::npu {
namespace {

namespace fs = std::filesystem;
using words::WordReader;

std::vector<BufferRecord> read_buffers(WordReader& reader) {
  return reader.list([&] { return BufferRecord{reader.text(), reader.size()}; });
}

CallRecord read_call(WordReader& reader, std::size_t arrays) {
  return {.op_type = reader.text(),
          .name = reader.text(),
          .array = reader.index(arrays, "arrays"),
          .file = reader.text(),
          .crc = reader.next(),
          .buffers = read_buffers(reader)};
}

HostCallRecord read_host_call(WordReader& reader) {
  HostCallRecord call;
  call.op_type = reader.text();
  const std::size_t parameters = reader.count();
  for (std::size_t i = 0; i < parameters; ++i) {
    std::string key = reader.text();
    call.parameters[std::move(key)] = reader.integers();
  }
  call.buffers = read_buffers(reader);
  return call;
}

std::int64_t sum_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw words::Error(utf8_of(path) + " cannot be read");
  std::uint32_t sum = 0;
  std::vector<char> piece(1 << 16);
  do {
    file.read(piece.data(), static_cast<std::streamsize>(piece.size()));
    const auto bytes = static_cast<std::size_t>(file.gcount());
    sum = crc32(std::as_bytes(std::span(piece).first(bytes)), sum);
  } while (file);
  if (file.bad()) throw words::Error(utf8_of(path) + " cannot be read");
  return sum;
}

fs::path index_of(const std::string& folder) { return path_of(folder) / "index.words"; }

}  // namespace

bool Artifacts::are_in(const std::string& folder) {
  std::error_code ignored;
  return fs::exists(index_of(folder), ignored);
}

Artifacts::Artifacts(std::string folder, bool emulated)
    : folder_(std::move(folder)), emulated_(emulated) {
  if (!are_in(folder_)) {
    refuse("expected the compiled designs of this model in " + folder_ + ", found no index.words",
           "build them");
  }
  try {
    read_index(words::read_words(index_of(folder_)));
  } catch (const words::Error& error) {
    refuse(error.what(), "build them again");
  }
}

void Artifacts::read_index(std::span<const std::int64_t> words) {
  WordReader reader(words, folder_ + "/index.words");
  const std::int64_t sum = reader.head(words::WordKind::kIndex);
  if (crc32(std::as_bytes(reader.rest())) != sum)
    throw words::Error(folder_ + "/index.words is damaged: its sum is another");
  target_ = reader.text();
  if (target_ != "npu1" && target_ != "npu2") {
    throw words::Error(folder_ + " has designs for '" + std::exchange(target_, "") +
                       "', expected designs for npu1 or npu2");
  }
  if (reader.flag() != emulated_) {
    throw words::Error(folder_ + " has designs for " + (emulated_ ? "a real NPU" : "the emulator") +
                       ", expected designs for " + (emulated_ ? "the emulator" : "a real NPU"));
  }
  identity_ = reader.text();
  arrays_ = reader.list([&] { return ArrayRecord{reader.text(), reader.text(), reader.next()}; });
  calls_ = reader.list([&] { return read_call(reader, arrays_.size()); });
  host_calls_ = reader.list([&] { return read_host_call(reader); });
  programs_ = reader.list([&] { return read_program(reader, calls_, host_calls_); });
  std::ranges::stable_sort(programs_, {}, &ProgramRecord::tokens);
}

std::string Artifacts::build_command() const {
  const fs::path folder = path_of(folder_).lexically_normal();
  // Without --output, `flownpu build` writes to MODEL/artifacts/emulate or MODEL/artifacts/TARGET.
  const fs::path artifacts =
      folder.has_filename() ? folder.parent_path() : folder.parent_path().parent_path();
  const bool usual = artifacts.filename() == "artifacts";
  std::string command = "flownpu build ";
  command += usual ? utf8_of(artifacts.parent_path()) : "MODEL";
  command += emulated_ ? " --for emulate" : " --for xclbin";
  if (!target_.empty()) command += " --target " + target_;
  return usual ? command : command + " --output " + folder_;
}

void Artifacts::refuse(const std::string& why, const std::string& what_to_do) const {
  fail_device(Failure::kArtifact, why, "; ", what_to_do, ": `", build_command(), "`");
}

bool Artifacts::has(std::string_view kind) const {
  return std::ranges::find(programs_, kind, &ProgramRecord::kind) != programs_.end();
}

std::vector<const ProgramRecord*> Artifacts::programs(std::string_view kind,
                                                      const Node& node) const {
  std::vector<const ProgramRecord*> found;
  for (const ProgramRecord& program : programs_) {
    if (program.kind == kind && program.difference(node).empty()) found.push_back(&program);
  }
  return found;
}

std::vector<const ProgramRecord*> Artifacts::require(std::string_view kind,
                                                     const Node& node) const {
  std::vector<const ProgramRecord*> found = programs(kind, node);
  if (!found.empty()) return found;
  std::set<std::string> others;
  for (const ProgramRecord& program : programs_) {
    if (program.kind == kind) others.insert(program.difference(node));
  }
  std::string there;
  for (const std::string& other : others) there += (there.empty() ? "" : ", and ") + other;
  refuse("expected a program of this model to " + std::string(kind) + " in " + folder_ +
             "; there is " + (there.empty() ? "none" : "one for a model with " + there),
         "build the designs of this model");
}

std::string Artifacts::array_file(const CallRecord& call) const {
  const ArrayRecord& array = arrays_[call.array];
  return checked(array.file, array.crc);
}

CallFamily Artifacts::family(const CallRecord& call) const {
  const std::string path = checked(call.file, call.crc);
  try {
    return CallFamily::read(words::read_words(path_of(path)));
  } catch (const std::exception& error) {
    refuse(path + ": " + error.what(), "build them again");
  }
}

void Artifacts::check(std::span<const ProgramRecord* const> programs) const {
  std::set<std::size_t> arrays;
  std::set<std::size_t> calls;
  for (const ProgramRecord* program : programs) {
    for (const DispatchRecord& dispatch : program->dispatches) {
      if (dispatch.host) continue;
      for (const StepRecord& step : dispatch.steps) {
        if (!calls.insert(step.call).second) continue;
        const CallRecord& record = calls_[step.call];
        if (arrays.insert(record.array).second) array_file(record);
        family(record);
      }
    }
  }
}

std::string Artifacts::checked(const std::string& file, std::int64_t sum) const {
  const fs::path path = path_of(folder_) / path_of(file);
  try {
    if (sum_of(path) == sum) return utf8_of(path);
  } catch (const words::Error& error) {
    refuse(error.what(), "build them again");
  }
  refuse(utf8_of(path) + " is not the file that was built: its sum is another", "build them again");
}

}  // namespace flownpu::npu
