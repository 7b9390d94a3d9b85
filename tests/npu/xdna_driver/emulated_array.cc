// SPDX-License-Identifier: Apache-2.0
#include "tests/npu/xdna_driver/emulated_array.h"

#include <cstring>
#include <vector>

#include "tests/npu/xdna_driver/state.h"

namespace xdna_driver {

std::unique_ptr<flownpu::emulator::Emulator> make_emulator(std::span<const std::int64_t> words) {
  using flownpu::emulator::Emulator;
  return std::make_unique<Emulator>(
      flownpu::emulator::read_array(words),
      flownpu::emulator::kernels_of(flownpu::emulator::load_kernels(kernel_library())));
}

flownpu::emulator::Sequence read_instructions(std::span<const std::byte> instructions) {
  std::vector<std::int64_t> wide(instructions.size() / sizeof(std::int64_t));
  std::memcpy(wide.data(), instructions.data(), wide.size() * sizeof(std::int64_t));
  return flownpu::emulator::read_sequence(wide);
}

}  // namespace xdna_driver
