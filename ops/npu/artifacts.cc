// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/artifacts.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>
#include <utility>

#include "aie/emulator/word_reader.h"
#include "ops/crc32.h"
#include "ops/npu/runtime.h"

namespace flownpu::npu {
namespace {

namespace fs = std::filesystem;
using emulator::WordReader;

// How many of an operator's calls a message tells of.
constexpr std::size_t kTold = 3;

std::string text_of(const std::vector<std::int64_t>& values) {
  std::ostringstream text;
  for (std::size_t i = 0; i < values.size(); ++i) text << (i > 0 ? "," : "") << values[i];
  return text.str();
}

std::string text_of(const CallAttributes& attributes) {
  std::string text;
  for (const auto& [key, values] : attributes)
    text += (text.empty() ? "" : ", ") + key + " " + text_of(values);
  return text;
}

// What of `expected` the attributes do not have.
CallAttributes differing(const CallAttributes& attributes, const CallAttributes& expected) {
  CallAttributes found;
  for (const auto& [key, values] : expected) {
    const auto at = attributes.find(key);
    if (at == attributes.end()) {
      found[key] = {};
    } else if (at->second != values) {
      found[key] = at->second;
    }
  }
  return found;
}

CallRecord read_call(WordReader& reader, std::size_t arrays) {
  CallRecord call;
  call.op_type = reader.text();
  call.name = reader.text();
  const std::size_t attributes = reader.count();
  for (std::size_t i = 0; i < attributes; ++i) {
    std::string key = reader.text();
    call.attributes[std::move(key)] = reader.integers();
  }
  call.array = reader.index(arrays, "arrays");
  call.file = reader.text();
  call.crc = reader.next();
  call.buffers = reader.list([&] {
    std::string name = reader.text();
    return BufferRecord{std::move(name), reader.size()};
  });
  return call;
}

std::int64_t sum_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw emulator::Error(path.string() + " cannot be read");
  std::uint32_t sum = 0;
  std::vector<char> piece(1 << 16);
  do {
    file.read(piece.data(), static_cast<std::streamsize>(piece.size()));
    const auto bytes = static_cast<std::size_t>(file.gcount());
    sum = crc32(std::as_bytes(std::span(piece).first(bytes)), sum);
  } while (file);
  if (file.bad()) throw emulator::Error(path.string() + " cannot be read");
  return sum;
}

}  // namespace

Artifacts::Artifacts(std::string folder, bool emulated)
    : folder_(std::move(folder)), emulated_(emulated) {
  const fs::path index = fs::path(folder_) / "index.words";
  std::error_code ignored;
  if (!fs::exists(index, ignored)) {
    refuse("expected the compiled designs of this model in " + folder_ + ", found no index.words",
           "build them");
  }
  try {
    read_index(emulator::read_words(index.string()));
  } catch (const emulator::Error& error) {
    refuse(error.what(), "build them again");
  }
}

void Artifacts::read_index(std::span<const std::int64_t> words) {
  WordReader reader(words, folder_ + "/index.words");
  const std::int64_t sum = reader.head(emulator::WordKind::kIndex);
  if (crc32(std::as_bytes(reader.rest())) != sum)
    throw emulator::Error(folder_ + "/index.words is damaged: its sum is another");
  target_ = reader.text();
  if (target_ != "npu1" && target_ != "npu2") {
    throw emulator::Error(folder_ + " has designs for '" + std::exchange(target_, "") +
                          "', expected designs for npu1 or npu2");
  }
  if (reader.flag() != emulated_) {
    throw emulator::Error(folder_ + " has designs for " +
                          (emulated_ ? "a real NPU" : "the emulator") + ", expected designs for " +
                          (emulated_ ? "the emulator" : "a real NPU"));
  }
  identity_ = reader.text();
  arrays_ = reader.list([&] {
    std::string name = reader.text();
    std::string file = reader.text();
    return ArrayRecord{std::move(name), std::move(file), reader.next()};
  });
  calls_ = reader.list([&] { return read_call(reader, arrays_.size()); });
}

std::string Artifacts::build_command() const {
  const fs::path folder = fs::path(folder_).lexically_normal();
  // `flownpu build` writes to MODEL/artifacts/emulate, or the target's name, unless it is told.
  const fs::path artifacts =
      folder.has_filename() ? folder.parent_path() : folder.parent_path().parent_path();
  const bool usual = artifacts.filename() == "artifacts";
  std::string command = "flownpu build ";
  command += usual ? artifacts.parent_path().string() : "MODEL";
  command += emulated_ ? " --for emulate" : " --for xclbin";
  if (!target_.empty()) command += " --target " + target_;
  return usual ? command : command + " --output " + folder_;
}

void Artifacts::refuse(const std::string& why, const std::string& what_to_do) const {
  throw DeviceError(Failure::kArtifact,
                    "[FlowNPU] " + why + "; " + what_to_do + ": `" + build_command() + "`");
}

std::vector<const CallRecord*> Artifacts::find(std::string_view op_type,
                                               const CallAttributes& attributes) const {
  std::vector<const CallRecord*> found;
  for (const CallRecord& call : calls_) {
    if (call.op_type == op_type && differing(call.attributes, attributes).empty())
      found.push_back(&call);
  }
  return found;
}

const CallRecord& Artifacts::require(std::string_view op_type,
                                     const CallAttributes& attributes) const {
  const std::vector<const CallRecord*> found = find(op_type, attributes);
  if (found.size() == 1) return *found.front();
  const std::string wanted = std::string(op_type) + " with " + text_of(attributes);
  if (!found.empty()) {
    std::string names;
    for (const CallRecord* call : found) names += (names.empty() ? "" : ", ") + call->name;
    refuse(folder_ + " has several calls of " + wanted + ": " + names, "build them again");
  }
  // The nearest ones first, by how many attributes are others; then as they are in the index.
  std::vector<std::pair<CallAttributes, const CallRecord*>> others;
  for (const CallRecord* call : find(op_type, {}))
    others.emplace_back(differing(call->attributes, attributes), call);
  std::sort(others.begin(), others.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first.size(), a.second) < std::pair(b.first.size(), b.second);
  });
  std::string there = others.empty() ? "none of " + std::string(op_type) : "";
  for (std::size_t i = 0; i < std::min(others.size(), kTold); ++i)
    there += (i > 0 ? "; " : "") + others[i].second->name + " with " + text_of(others[i].first);
  if (others.size() > kTold) there += "; and " + std::to_string(others.size() - kTold) + " more";
  refuse("expected " + wanted + " in " + folder_ + "; there is " + there,
         "build the designs of this model");
}

std::string Artifacts::array_file(const CallRecord& call) const {
  const ArrayRecord& array = arrays_[call.array];
  return checked(array.file, array.crc);
}

CallFamily Artifacts::family(const CallRecord& call) const {
  const std::string path = checked(call.file, call.crc);
  try {
    return CallFamily::read(emulator::read_words(path));
  } catch (const std::exception& error) {
    refuse(path + ": " + error.what(), "build them again");
  }
}

std::string Artifacts::checked(const std::string& file, std::int64_t sum) const {
  const fs::path path = fs::path(folder_) / file;
  try {
    if (sum_of(path) == sum) return path.string();
  } catch (const emulator::Error& error) {
    refuse(error.what(), "build them again");
  }
  refuse(path.string() + " is not the file that was built: its sum is another", "build them again");
}

}  // namespace flownpu::npu
