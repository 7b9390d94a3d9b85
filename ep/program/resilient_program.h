// SPDX-License-Identifier: Apache-2.0
// ResilientProgram: a program, and another of the same partition that takes over where the first
// one's device cannot go on.
#pragma once

#include <atomic>
#include <memory>

#include "ep/program/program.h"

namespace flownpu {

// A run that the device does not take (Unsupported) is computed by the other program, and so is
// every run after one in which the device failed (DeviceFailed), which itself ends with the error:
// what it left behind of its outputs is not known. What the device keeps for its caller it gives
// back first (Device::restore), so that the other goes on where it was.
class ResilientProgram {
 public:
  // `other` may be null: then there is none to take over. `device`: the first one's.
  ResilientProgram(std::shared_ptr<const Device> device, std::unique_ptr<const Program> program,
                   std::unique_ptr<const Program> other);

  // As Program::run.
  void run(ProgramIo& io, StepObserver* observer) const;

 private:
  void run_other(ProgramIo& io, StepObserver* observer) const;

  std::shared_ptr<const Device> device_;
  std::unique_ptr<const Program> program_;
  std::unique_ptr<const Program> other_;
  mutable std::atomic<bool> failed_ = false;
};

}  // namespace flownpu
