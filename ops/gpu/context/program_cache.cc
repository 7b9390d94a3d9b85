// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/context/program_cache.h"

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <span>
#include <sstream>
#include <system_error>

#include "ops/formats/crc32.h"
#include "ops/system/new_file.h"
#include "ops/system/paths.h"

namespace flownpu::gpu {
namespace {

// The file: this head, the key, the binary.
struct Head {
  std::array<char, 8> magic;
  std::uint64_t key_bytes;
  std::uint64_t binary_bytes;
  std::uint64_t sum;  // CRC-32 of what follows
};
constexpr std::array<char, 8> kMagic{'F', 'N', 'P', 'U', 'O', 'C', 'L', '1'};

std::uint32_t sum_of(const std::string& content) {
  return crc32(std::as_bytes(std::span(content.data(), content.size())));
}

// FNV-1a, to name files. Where two keys have the same hash, the key in the file tells them apart.
std::uint64_t hash(const std::string& text) {
  std::uint64_t found = 0xcbf29ce484222325U;
  for (const char letter : text) {
    found ^= static_cast<unsigned char>(letter);
    found *= 0x100000001b3U;
  }
  return found;
}

}  // namespace

std::filesystem::path default_cache_folder() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::optional<std::string>(value == nullptr ? std::nullopt : std::optional(value));
  };
  if (const auto given = variable(kCacheVariable)) return *given;
  if (const auto caches = variable("XDG_CACHE_HOME"); caches && !caches->empty())
    return std::filesystem::path(*caches) / "flownpu" / "opencl";
  if (const auto home = variable("HOME"); home && !home->empty())
    return std::filesystem::path(*home) / ".cache" / "flownpu" / "opencl";
  return {};
}

std::filesystem::path ProgramCache::file_of(const std::string& key) const {
  std::ostringstream name;
  name << std::hex << hash(key) << ".bin";
  return folder_ / name.str();
}

std::optional<std::vector<unsigned char>> ProgramCache::find(const std::string& key) const {
  if (folder_.empty()) return std::nullopt;
  std::ifstream file(file_of(key), std::ios::binary);
  Head head{};
  if (!file.read(reinterpret_cast<char*>(&head), sizeof(head)) || head.magic != kMagic ||
      head.key_bytes != key.size()) {
    return std::nullopt;
  }
  const std::string content{std::istreambuf_iterator<char>(file), {}};
  const bool whole = content.size() >= key.size() &&
                     head.binary_bytes == content.size() - key.size() &&
                     sum_of(content) == head.sum && content.compare(0, key.size(), key) == 0;
  if (!whole) return std::nullopt;
  return std::vector<unsigned char>(content.begin() + static_cast<std::ptrdiff_t>(key.size()),
                                    content.end());
}

void ProgramCache::keep(const std::string& key, const std::vector<unsigned char>& binary) {
  problem_.clear();
  if (folder_.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  const std::filesystem::path file = file_of(key);
  const std::string content = key + std::string(binary.begin(), binary.end());
  const Head head{kMagic, key.size(), binary.size(), sum_of(content)};
  NewFile to(file);
  to.content().write(reinterpret_cast<const char*>(&head), sizeof(head));
  to.content().write(content.data(), static_cast<std::streamsize>(content.size()));
  if (const std::string problem = to.finish(); !problem.empty())
    problem_ = "could not write " + utf8_of(file) + ": " + problem;
}

}  // namespace flownpu::gpu
