// SPDX-License-Identifier: Apache-2.0
// CpuProvider: a partition on ONNX Runtime's own CPU provider, for runs that no device of ours
// takes: a shape that is known only at run time, say, though ONNX allows it. With the option
// on_unsupported=error there is none.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "ep/api.h"
#include "ep/model/onnx_model.h"
#include "ops/nodes/node.h"

namespace flownpu {

class CpuProvider {
 public:
  // `nodes` as ONNX Runtime gave them; `inputs` and `outputs`: of the fused node, constants
  // included, in its order. Its session is made by the first run.
  CpuProvider(const Api& api, std::vector<Node> nodes, std::vector<std::string> inputs,
              std::vector<std::string> outputs, OperatorSets opsets, int threads);
  ~CpuProvider();
  CpuProvider(const CpuProvider&) = delete;
  CpuProvider& operator=(const CpuProvider&) = delete;

  // Whether ONNX Runtime's CPU provider knows all the nodes: not those of our own domain, whose
  // definitions are in the model, nor of compiled partitions.
  static bool knows(const std::vector<Node>& nodes);

  // One run of the fused node. Throws Error with ONNX Runtime's message.
  void run(OrtKernelContext* context) const;

 private:
  OrtSession* session() const;
  void copy(OrtValue* result, OrtKernelContext* context, std::size_t index) const;

  Api api_;
  std::vector<Node> nodes_;
  std::vector<std::string> inputs_;
  std::vector<std::string> outputs_;
  std::set<std::string> constants_;
  OperatorSets opsets_;
  int threads_;
  mutable std::mutex mutex_;  // for what follows
  mutable OrtEnv* environment_ = nullptr;
  mutable OrtSession* session_ = nullptr;
};

}  // namespace flownpu
