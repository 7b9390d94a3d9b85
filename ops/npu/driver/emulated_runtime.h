// SPDX-License-Identifier: Apache-2.0
// The emulator (aie/emulator/) as a Runtime: the array that stands in for a real one.
//
// What holds of a real NPU holds here: a buffer has one copy for the host and one for the array,
// and only to_device and to_host make them equal; an array keeps its state from call to call; calls
// of one dispatch follow each other without a pause; after a failure the array takes no more.
//
// submit() runs the calls before it returns, and wait() only tells how they ended: its timeout is
// not looked at, since an array that cannot go on is found out, not waited for. Time and bandwidth
// are not modelled. Several threads may use a runtime, each with buffers and sequences of its own;
// an array runs one dispatch at a time.
#pragma once

#include <memory>
#include <string>

#include "ops/npu/driver/runtime.h"

namespace flownpu::npu {

// `target`: "npu1" or "npu2". `kernels`: the folder of libflownpu_aie_xdna.so and _xdna2.so, the
// NPU's kernels as compiled for this machine; empty: that of the library this is linked into.
// Throws DeviceError (kNoDevice) if they are not there.
std::unique_ptr<Runtime> open_emulated_runtime(const std::string& target,
                                               const std::string& kernels = "");

}  // namespace flownpu::npu
