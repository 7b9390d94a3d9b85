// SPDX-License-Identifier: Apache-2.0
// ResilientProgram: a program, and a second one for the same partition on another device, which
// takes over when the first one's device cannot continue.
#pragma once

#include <atomic>
#include <memory>

#include "ep/program/program.h"

namespace flownpu {

// The other program computes a run that the device does not take (Unsupported), and every run after
// one in which the device failed (DeviceFailed). That run itself ends with the error, since it is
// not known which of its outputs were written. Before the other program runs, the device writes
// back what it keeps for the caller (Device::restore), so that the other program continues from the
// same state.
class ResilientProgram {
 public:
  // `device`: the device of `program`. `other` may be null: then nothing takes over.
  ResilientProgram(std::shared_ptr<const Device> device, std::unique_ptr<const Program> program,
                   std::unique_ptr<const Program> other);

  // As Program::run. When the device fails, the error also says what happens to later runs.
  void run(ProgramIo& io, StepObserver* observer) const;

 private:
  void run_other(ProgramIo& io, StepObserver* observer) const;

  std::shared_ptr<const Device> device_;
  std::unique_ptr<const Program> program_;
  std::unique_ptr<const Program> other_;
  mutable std::atomic<bool> failed_ = false;
};

}  // namespace flownpu
