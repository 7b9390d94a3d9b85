// SPDX-License-Identifier: Apache-2.0
// Termination: obeys RunOptions.terminate while a partition computes. ONNX Runtime reads the option
// only between two nodes, and a partition is one node.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ep/api.h"
#include "ep/run/own_session.h"
#include "ops/cancellation.h"

namespace flownpu {

// No function tells whether the flag is set, but a run with the same options fails if it is. So a
// model of one node runs with them every kInterval, which takes some 10 us.
//
// A run whose options fail for another reason (LoRA adapters, which are inputs that this model
// lacks) is not asked again, nor is one that ONNX Runtime has moved to another thread
// (ExecutionMode.ORT_PARALLEL).
class Termination final : public Cancellation {
 public:
  explicit Termination(const Api& api) : api_(api) {}

  // OrtEp::OnRunStart and OnRunEnd, on the thread that called Run.
  void begin(const OrtRunOptions* options);
  void end();

  // Throws Error with ONNX Runtime's message if this thread's run must end.
  void check() override;
  // The options of this thread's run, if another session takes them; else null.
  const OrtRunOptions* options();

 private:
  struct Running;

  Running* running() const;
  void ask(Running& run);
  void run_model(const OrtRunOptions* options) const;
  void prepare();

  static thread_local std::vector<Running> runs;

  const Api& api_;
  std::once_flag once_;
  std::unique_ptr<OwnSession> session_;  // of one node
  std::string terminated_;  // the message of a terminated run; empty if ONNX Runtime gave none
};

}  // namespace flownpu
