// SPDX-License-Identifier: Apache-2.0
// The memories of all tiles.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "aie/emulator/program.h"

namespace flownpu::emulator {

// Each memory begins at a multiple of 64 bytes and has a red zone behind it. Bytes that hold
// nothing are all ones: NaN in bf16 and f32, -1 as an integer; so data that is used before it was
// written, or after it was given back, shows in the results.
class Memories {
 public:
  explicit Memories(const std::vector<Memory>& records);

  [[nodiscard]] std::byte* data(std::size_t memory) const { return data_[memory]; }
  [[nodiscard]] const Memory& record(std::size_t memory) const { return (*records_)[memory]; }
  [[nodiscard]] std::size_t bytes(std::size_t memory) const { return record(memory).bytes; }

  // Throws Error, naming `who`, if something wrote behind the memory.
  void check_red_zone(std::size_t memory, const std::string& who) const;
  // Marks these bytes as holding nothing.
  static void forget(std::byte* data, std::size_t bytes);

  // Loads or stores a 32-bit word; `index` counts words. Both throw Error where the index is
  // outside of the memory, loading also where the word is a run-time parameter that was never
  // written.
  [[nodiscard]] std::int32_t load(std::size_t memory, std::int64_t index) const;
  void store(std::size_t memory, std::int64_t index, std::int64_t value);

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  void check_index(std::size_t memory, std::int64_t index) const;

  const std::vector<Memory>* records_;
  std::unique_ptr<std::byte[], Free> arena_;
  std::vector<std::byte*> data_;
  std::vector<std::vector<bool>> written_;  // for each word of run-time parameters
};

}  // namespace flownpu::emulator
