// SPDX-License-Identifier: Apache-2.0
// Ep: the execution provider of one session. Chooses the device, claims nodes, compiles them, and
// reports what runs where.
#pragma once

#include <memory>
#include <optional>
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

// The way to make a session fail. CreateEp and GetCapability would be the obvious places. But if
// CreateEp fails, onnxruntime's Python session prints the error and starts again on the CPU
// provider, and ORT only logs an error of GetCapability. An error of Compile reaches the user
// unchanged, so Compile reports invalid options, missing devices and nodes that are not taken. ORT
// calls Compile if anything was claimed; if nothing could be, OnSessionInitializationEnd (ORT 1.27
// and later) reports the error.
class Ep final : public ort::OrtEp {
 public:
  // `session`: the session's options. `has_npu`: whether the session was given an NPU. `logger` is
  // the session's and outlives this object.
  Ep(const Api& api, const OrtSessionOptions* session, bool has_npu, const OrtLogger* logger);

 private:
  void fill_slots();
  // The implementations of the OrtEp slots; they throw exceptions.
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
  Placement& place(const std::vector<GraphNode>& nodes, const Partitions& partitions, bool is_body);
  void add_bodies(const std::vector<GraphNode>& nodes, Placement& placed);
  void claim(const std::vector<const OrtNode*>& nodes, OrtEpGraphSupportInfo* support) const;
  void claim_rejected(const std::vector<GraphNode>& nodes, const Partitions& partitions,
                      const Placement& placed, OrtEpGraphSupportInfo* support) const;
  void claim_to_fail(const std::vector<GraphNode>& nodes, OrtEpGraphSupportInfo* support) const;
  // Throws Error if the session must fail.
  void check() const;
  // A graph's number of nodes, and those of them that are left.
  struct LeftNodes {
    std::size_t nodes = 0;
    std::vector<Placement::Left> left;
  };
  LeftNodes left_in_model() const;
  std::vector<Placement::Left> inlined_nodes() const;
  // Whether ORT calls OnSessionInitializationEnd.
  bool reports_when_ready() const { return api_.version() >= ort::kInitializationEndVersion; }
  void report_placement();
  // The path of the file that the option `placement` asks for.
  std::string placement_path() const;

  Api api_;
  Options options_;
  ContextRequest context_;
  std::size_t partitions_kept_ = 0;
  std::string compatibility_;  // what GetCompiledModelCompatibilityInfo returns
  const OrtLogger* logger_;
  Termination termination_{api_};
  // Null if the device could not be made; `setup_error_` then says why.
  std::shared_ptr<const Device> device_;
  std::string setup_error_;
  // The placement of the model as ORT last passed its graph to GetCapability, which it calls more
  // than once, before and after it inlines functions.
  Placement placement_;
  // The placements of those bodies of If, Loop and Scan whose outer graph ORT has not asked for
  // yet. ORT partitions and compiles bodies before the graph around them: the last is being
  // compiled.
  std::vector<Placement> bodies_;
  std::string model_name_;  // the model file's name without suffix; empty for a model from memory
  // Device::obstacle() of the graph that ORT last passed to GetCapability.
  std::string obstacle_;
  std::vector<Placement::Left> rejected_operators_;
  // The first graph has functions as nodes.
  std::optional<LeftNodes> first_left_;
  bool reported_ = false;
};

}  // namespace flownpu
