// SPDX-License-Identifier: Apache-2.0
// What this build has of the NPU; the device itself is made by make_npu_device() of ops/device.h.
#pragma once

namespace flownpu {

// Whether make_npu_device() can drive an NPU in this build; if not, none is offered to ONNX
// Runtime.
bool npu_built_in();

}  // namespace flownpu
