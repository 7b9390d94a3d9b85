// SPDX-License-Identifier: Apache-2.0
#include "aie/emulator/memories.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace flownpu::emulator {
namespace {

constexpr std::size_t kAlignment = 64;  // aie/kernels/README.md
constexpr std::size_t kRedZone = 64;
constexpr auto kRed = std::byte{0xA5};
constexpr int kNothing = 0xFF;
constexpr std::size_t kWord = 4;

std::size_t padded(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment + kRedZone;
}

}  // namespace

void Memories::Free::operator()(std::byte* data) const {
  ::operator delete[](data, std::align_val_t{kAlignment});
}

Memories::Memories(const std::vector<Memory>& records) : records_(&records) {
  std::size_t bytes = 0;
  for (const Memory& record : records) bytes += padded(record.bytes);
  arena_.reset(static_cast<std::byte*>(::operator new[](bytes, std::align_val_t{kAlignment})));
  std::fill_n(arena_.get(), bytes, kRed);
  std::byte* next = arena_.get();
  for (const Memory& record : records) {
    data_.push_back(next);
    forget(next, record.bytes);
    std::copy(record.initial.begin(), record.initial.end(), next);
    next += padded(record.bytes);
    written_.emplace_back(record.parameters ? record.bytes / kWord : 0, !record.initial.empty());
  }
}

void Memories::check_red_zone(std::size_t memory, const std::string& who) const {
  const std::byte* behind = data_[memory] + bytes(memory);
  const std::byte* end = data_[memory] + padded(bytes(memory));
  if (std::any_of(behind, end, [](std::byte b) { return b != kRed; })) {
    throw Error("[emulator] " + who + " wrote behind " + record(memory).name + ", which has " +
                std::to_string(bytes(memory)) + " bytes");
  }
}

void Memories::forget(std::byte* data, std::size_t bytes) { std::memset(data, kNothing, bytes); }

void Memories::check_index(std::size_t memory, std::int64_t index) const {
  const auto words = static_cast<std::int64_t>(bytes(memory) / kWord);
  if (index < 0 || index >= words) {
    throw Error("[emulator] word " + std::to_string(index) + " of " + record(memory).name +
                ", which has " + std::to_string(words));
  }
}

std::int32_t Memories::load(std::size_t memory, std::int64_t index) const {
  check_index(memory, index);
  if (record(memory).parameters && !written_[memory][static_cast<std::size_t>(index)]) {
    throw Error("[emulator] word " + std::to_string(index) + " of " + record(memory).name +
                " is loaded before it was written");
  }
  std::int32_t value = 0;
  std::memcpy(&value, data_[memory] + static_cast<std::size_t>(index) * kWord, kWord);
  return value;
}

void Memories::store(std::size_t memory, std::int64_t index, std::int64_t value) {
  check_index(memory, index);
  const auto word = static_cast<std::uint32_t>(value);
  std::memcpy(data_[memory] + static_cast<std::size_t>(index) * kWord, &word, kWord);
  if (record(memory).parameters) written_[memory][static_cast<std::size_t>(index)] = true;
}

}  // namespace flownpu::emulator
