// SPDX-License-Identifier: Apache-2.0
// The device of a session, by its options and by what the machine has.
#pragma once

#include <memory>
#include <string>

#include "ep/options.h"
#include "ops/device.h"

namespace flownpu {

struct ChosenDevice {
  std::shared_ptr<const Device> device;
  // For the placement report: "device=auto and the session was given no NPU", or the prices that
  // decided.
  std::string why;
};

// `has_npu`: whether the session was given an NPU. Throws Error where the device that the options
// name is missing, or for prices that lack what `prefer` compares.
ChosenDevice choose_device(const Options& options, bool has_npu);

}  // namespace flownpu
