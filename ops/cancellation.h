// SPDX-License-Identifier: Apache-2.0
// Cancellation: lets a run end before it has computed everything, where it is asked to.
#pragma once

namespace flownpu {

class Cancellation {
 public:
  virtual ~Cancellation() = default;
  // Throws Error if the run is to end. Called often: it must cost next to nothing.
  virtual void check() = 0;
};

// To be called where a run may stop, between two steps, dispatches or slices: throws what the check
// of the run that this thread executes throws. Nothing that only later work undoes may be pending.
void check_cancelled();

// Sets what the calling thread's run is asked by, which may be null, for the lifetime of this
// object.
class Cancellable {
 public:
  explicit Cancellable(Cancellation* cancellation);
  ~Cancellable();
  Cancellable(const Cancellable&) = delete;
  Cancellable& operator=(const Cancellable&) = delete;

 private:
  Cancellation* before_;
};

}  // namespace flownpu
