// SPDX-License-Identifier: Apache-2.0
// The array of the driver's double: the emulator, which reads its own words where aiecc's xclbins
// have a configuration and instructions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "aie/emulator/emulator.h"

namespace xdna_driver {

// `words`: of an array (aie/words/writer.py). Throws emulator::Error.
std::unique_ptr<flownpu::emulator::Emulator> make_emulator(std::span<const std::int64_t> words);

// `instructions`: the emulator's words of 64 bits, each as two of 32 bits with the low half first.
// Throws emulator::Error.
flownpu::emulator::Sequence read_instructions(std::span<const std::byte> instructions);

}  // namespace xdna_driver
