// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flownpu::cpu {

// L2 of a core of this machine; 512 KB, the least of the processors in sight (Haswell and Skylake
// have 256 KB and 1 MB, Zen 512 KB and 1 MB), if the system does not tell.
std::int64_t cache_bytes();

}  // namespace flownpu::cpu
