// SPDX-License-Identifier: Apache-2.0
// Ep: the provider of one session. Chooses the device, claims nodes, compiles them, says what runs
// where.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ep/api.h"
#include "ep/compile/capability.h"
#include "ep/compile/compiler.h"
#include "ep/compile/placement.h"
#include "ep/context/compiled_model.h"
#include "ep/model/graph.h"
#include "ep/options.h"
#include "ep/run/compute.h"
#include "ops/device.h"

namespace flownpu {

// How a session is made to fail. ORT's two natural places for it do not serve: on an error of
// CreateEp, onnxruntime's Python session prints it and starts again on the CPU provider, and of an
// error of GetCapability ORT makes a line in its log. An error of Compile reaches the user word for
// word, so that is where a bad option, a device that is not there and a node that is not taken are
// told. ORT calls Compile if anything was claimed; where nothing could be,
// OnSessionInitializationEnd (ORT 1.27 and later) tells it.
class Ep final : public ort::OrtEp {
 public:
  // `session`: its options. `has_npu`: the session was given an NPU. `logger` is the session's and
  // outlives it.
  Ep(const Api& api, const OrtSessionOptions* session, bool has_npu, const OrtLogger* logger);

 private:
  void fill_slots();
  // What the OrtEp slots do; errors by exception.
  void get_capability(const OrtGraph* graph, OrtEpGraphSupportInfo* support);
  void compile(const OrtGraph** graphs, const OrtNode** fused_nodes, std::size_t count,
               ort::OrtNodeComputeInfo** compute_infos, OrtNode** context_nodes);
  std::unique_ptr<ComputeInfo> compile(const OrtGraph* graph, const OrtNode* fused,
                                       OrtNode** context_node);
  CompiledPartition compile_nodes(std::vector<Node> nodes, const OrtGraph* graph,
                                  const OrtNode* fused, OrtNode** context_node);
  std::unique_ptr<CpuProvider> elsewhere(const std::vector<Node>& nodes, const OrtGraph* graph,
                                         const OrtNode* fused) const;
  void on_session_ready();

  std::string obstacle(const OrtGraph* graph, const std::vector<GraphNode>& nodes,
                       const Partitions& partitions) const;
  void claim(const std::vector<const OrtNode*>& nodes, OrtEpGraphSupportInfo* support) const;
  void claim_to_fail(const std::vector<GraphNode>& nodes, OrtEpGraphSupportInfo* support) const;
  // Throws Error if the session must fail.
  void check() const;
  std::vector<Placement::Left> inlined_nodes() const;
  void report_placement();
  // The file that the option `placement` names.
  std::string placement_path() const;

  Api api_;
  Options options_;
  ContextRequest context_;
  std::size_t partitions_kept_ = 0;
  std::string compatibility_;  // What ORT was last told.
  const OrtLogger* logger_;
  // Null if it could not be made; then `setup_error_` says why.
  std::shared_ptr<const Device> device_;
  std::string setup_error_;
  // Placement in the last graph that ORT asked about: it asks more than once, before and after it
  // inlines functions.
  Placement placement_;
  std::string model_name_;  // its file's, without the suffix; empty if it came from memory
  // What the device says of that graph as a whole: Device::obstacle.
  std::string obstacle_;
  std::vector<Placement::Left> rejected_operators_;
  bool reported_ = false;
};

}  // namespace flownpu
