// SPDX-License-Identifier: Apache-2.0
#include "aie/words/reader.h"

#include <cstring>
#include <fstream>

namespace flownpu::words {
namespace {

constexpr std::int64_t kMagic = 0x0055504E776F6C46;  // "FlowNPU\0", little-endian
constexpr std::size_t kWord = sizeof(std::int64_t);

const char* name_of(WordKind kind) {
  switch (kind) {
    case WordKind::kArray:
      return "an array";
    case WordKind::kSequence:
      return "a sequence";
    case WordKind::kIndex:
      return "an index of artifacts";
    case WordKind::kFamily:
      return "a family of calls";
  }
  return "words";
}

}  // namespace

std::vector<std::byte> WordReader::bytes() {
  const std::size_t size = this->size();
  const std::size_t words = size / kWord + (size % kWord == 0 ? 0 : 1);
  if (words > words_.size() - at_) fail(" ends in the middle");
  std::vector<std::byte> bytes(size);
  if (size > 0) std::memcpy(bytes.data(), words_.data() + at_, size);
  at_ += words;
  return bytes;
}

std::string WordReader::text() {
  const std::vector<std::byte> raw = bytes();
  return {reinterpret_cast<const char*>(raw.data()), raw.size()};
}

std::int64_t WordReader::head(WordKind kind) {
  if (next() != kMagic) fail(": these are no words that FlowNPU wrote");
  if (const std::int64_t version = next(); version != kVersion) {
    fail(": expected version " + std::to_string(kVersion) + ", got version " +
         std::to_string(version) + ": write it again");
  }
  if (next() != static_cast<std::int64_t>(kind)) fail(std::string(": expected ") + name_of(kind));
  return next();
}

std::vector<std::int64_t> read_words(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) throw Error(path.string() + " cannot be read");
  const std::streamoff bytes = file.tellg();
  if (bytes < 0 || bytes % static_cast<std::streamoff>(kWord) != 0) {
    throw Error(path.string() + " ends in the middle of a word");
  }
  std::vector<std::int64_t> words(static_cast<std::size_t>(bytes) / kWord);
  file.seekg(0);
  file.read(reinterpret_cast<char*>(words.data()), bytes);
  if (!file) throw Error(path.string() + " cannot be read");
  return words;
}

}  // namespace flownpu::words
