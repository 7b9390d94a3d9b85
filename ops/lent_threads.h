// SPDX-License-Identifier: Apache-2.0
// LentThreads: threads that the application lends for a run. Where other nodes of a model run on
// threads of ONNX Runtime, which spin for a while after each node, a second pool would find the
// processor's cores taken.
#pragma once

#include <cstddef>

namespace flownpu {

class LentThreads {
 public:
  virtual ~LentThreads() = default;
  // Calls work(context, index) for every index in [0, count), on the caller's thread and others,
  // and returns when all calls have returned. `work` must not throw. Throws Error if it can call
  // none.
  virtual void run(std::size_t count, void (*work)(void* context, std::size_t index),
                   void* context) = 0;

  // The threads that the calling thread's run was lent; null: none.
  static LentThreads* current();
};

// Lends `threads`, which may be null, to the calling thread's run, for the lifetime of this object.
class Lend {
 public:
  explicit Lend(LentThreads* threads);
  ~Lend();
  Lend(const Lend&) = delete;
  Lend& operator=(const Lend&) = delete;

 private:
  LentThreads* before_;
};

}  // namespace flownpu
