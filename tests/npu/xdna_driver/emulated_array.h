// SPDX-License-Identifier: Apache-2.0
// What stands in the place of an array in the double of the driver: the emulator, with its own
// words where aiecc's xclbins have a configuration and instructions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "aie/emulator/emulator.h"

namespace xdna_driver {

// `words`: of an array (aie/words/writer.py). Throws emulator::Error.
std::unique_ptr<flownpu::emulator::Emulator> make_emulator(std::span<const std::int64_t> words);

// Words of 32 bits as instructions are, of each of the emulator's the low half first. Throws
// emulator::Error.
flownpu::emulator::Sequence read_instructions(std::span<const std::byte> instructions);

}  // namespace xdna_driver
