// SPDX-License-Identifier: Apache-2.0
// Cancellation: lets a caller end a run before the run has computed everything.
#pragma once

namespace flownpu {

class Cancellation {
 public:
  virtual ~Cancellation() = default;
  // Throws Error if the run is to end. Called often: it must cost next to nothing.
  virtual void check() = 0;
};

// Ends the run here by an exception if its check asks for that. Steps call this between two steps,
// dispatches or slices, when no later work has to undo anything.
void check_cancelled();

// Sets the check of the calling thread's run, which may be null, for the lifetime of this object.
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
