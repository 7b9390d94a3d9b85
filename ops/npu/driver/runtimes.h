// SPDX-License-Identifier: Apache-2.0
// The implementations of Runtime.
#pragma once

#include <memory>
#include <string>

#include "ops/npu/driver/runtime.h"

namespace flownpu::npu {

// The emulator (aie/emulator/) as a Runtime, in place of a real array.
//
// It keeps the rules of a real NPU: a buffer has one copy for the host and one for the array, and
// only to_device and to_host make them equal; an array keeps its state from call to call; calls of
// one dispatch follow each other without a pause; after a failure the array takes no more calls.
//
// run() ignores its limit, because the emulator detects and reports an array that cannot continue.
// Time and bandwidth are not modelled. Several threads may use a runtime, each with buffers and
// sequences of its own; an array runs one dispatch at a time.
//
// `target`: "npu1" or "npu2". `kernels`: the folder of libflownpu_aie_xdna.so and _xdna2.so, the
// NPU's kernels compiled for this machine; empty: the folder of the library that this code is
// linked into. Throws DeviceError (kNoDevice) if they are not there, (kArtifact) for another
// target.
std::unique_ptr<Runtime> open_emulated_runtime(const std::string& target,
                                               const std::string& kernels = "");

// The first NPU that XRT finds, through the plugin libflownpu_xrt.so, which is loaded here. No NPU
// has run this code. It is tested over Debian's XRT with a test double in the place of the kernel's
// driver, which computes with the emulator (tests/npu/xdna_driver/).
//
// `plugin`: a file to load instead of libflownpu_xrt.so beside this library. Throws DeviceError:
// kVersion if there is no plugin, no XRT, or one of them is too old; kNoDevice; kPermission.
std::unique_ptr<Runtime> open_xrt_runtime(const std::string& plugin = "");

}  // namespace flownpu::npu
