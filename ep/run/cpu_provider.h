// SPDX-License-Identifier: Apache-2.0
// CpuProvider: runs a partition on ONNX Runtime's own CPU provider if the device does not take a
// run. For example, a shape known only at run time may be valid in ONNX but not supported here. It
// is not used with the option on_unsupported=error.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "ep/api.h"
#include "ep/model/onnx_model.h"
#include "ep/run/own_session.h"
#include "ops/nodes/node.h"

namespace flownpu {

class CpuProvider {
 public:
  // `nodes` as ONNX Runtime gave them; `inputs` and `outputs`: the fused node's names in its order,
  // constants included. The first run makes the session.
  CpuProvider(const Api& api, std::vector<Node> nodes, std::vector<std::string> inputs,
              std::vector<std::string> outputs, OperatorSets opsets, int threads);

  // Whether ONNX Runtime's CPU provider knows all the nodes. It knows neither FlowNPU's operators,
  // whose definitions are in the model, nor the nodes of compiled partitions.
  static bool knows(const std::vector<Node>& nodes);

  // Computes one run of the fused node; `options` may be null. Throws Error with ONNX Runtime's
  // message.
  void run(OrtKernelContext* context, const OrtRunOptions* options) const;

 private:
  const OwnSession& session() const;
  void copy(OrtValue* result, OrtKernelContext* context, std::size_t index) const;

  Api api_;
  std::vector<Node> nodes_;
  std::vector<std::string> inputs_;
  std::vector<std::string> outputs_;
  std::set<std::string> constants_;
  OperatorSets opsets_;
  int threads_;
  mutable std::mutex mutex_;  // guards session_
  mutable std::unique_ptr<OwnSession> session_;
};

}  // namespace flownpu
