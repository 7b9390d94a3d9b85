// SPDX-License-Identifier: Apache-2.0
#include "ep/ep.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "ep/compile/capability.h"
#include "ep/compile/compiler.h"
#include "ep/compile/count.h"
#include "ep/compile/device_choice.h"
#include "ep/compile/worth.h"
#include "ep/model/graph.h"
#include "ep/run/compute.h"
#include "ep/run/profiling.h"
#include "ops/formats/utf8.h"
#include "ops/system/new_file.h"
#include "ops/system/paths.h"

namespace flownpu {
namespace {

// How many nodes an error or a warning lists one by one.
constexpr std::size_t kListed = 20;

// Whether ORT or this provider knows the domain's operators. A node of any other domain may call
// one of the model's functions: unless it is claimed, ORT replaces it by the function's body and
// asks again.
bool is_known_domain(const std::string& domain) {
  return domain.empty() || domain == "com.microsoft" || domain == kDomain;
}

// ORT writes into a compiled model the constants that nodes of its graph read, but not those that
// only the bodies of If, Loop and Scan read. Returns the error for such a constant, or "".
std::string lost_constant(const std::vector<GraphNode>& nodes, const Partitions& partitions) {
  std::set<std::string_view> kept;
  for (const auto& [index, reason] : partitions.rejected)
    for (const Value& input : nodes[index].node.inputs) kept.insert(input.name);
  for (const auto& [index, reason] : partitions.rejected) {
    for (const std::string& constant : nodes[index].implicit_constants) {
      if (kept.contains(constant)) continue;
      return "[FlowNPU] ep.context_enable: a body of " + to_string(nodes[index].node) +
             " reads the constant '" + constant +
             "' of the graph around it, which ONNX Runtime leaves out of a compiled "
             "model; load the model itself instead";
    }
  }
  return "";
}

void write_report(const std::string& path, const std::string& report) {
  NewFile file(path_of(path));
  file.content() << report;
  if (const std::string problem = file.finish(); !problem.empty())
    fail("[FlowNPU] option placement: cannot write '", path, "': ", problem);
}

}  // namespace

Ep::Ep(const Api& api, const OrtSessionOptions* session, bool has_npu, const OrtLogger* logger)
    : api_(api), logger_(logger) {
  try {
    options_ = parse_options(read_entries(api_, session));
    context_ = read_context_request(api_, session);
    ChosenDevice chosen = choose_device(options_, has_npu);
    device_ = std::move(chosen.device);
    placement_.device = device_->description();
    placement_.why = std::move(chosen.why);
  } catch (const Error& error) {
    setup_error_ = error.what();
  }
  fill_slots();
}

void Ep::fill_slots() {
  ort_version_supported = api_.version();
  GetName = [](const OrtEp* /*self*/) noexcept { return kEpName; };
  GetCapability = [](OrtEp* self, const OrtGraph* graph, OrtEpGraphSupportInfo* support) noexcept {
    auto& ep = *static_cast<Ep*>(self);
    return guard(ep.api_, ort::ORT_FAIL, [&] {
      try {
        ep.get_capability(graph, support);
      } catch (const Error& error) {
        ep.setup_error_ = error.what();
        throw;
      }
    });
  };
  Compile = [](OrtEp* self, const OrtGraph** graphs, const OrtNode** fused_nodes, std::size_t count,
               ort::OrtNodeComputeInfo** compute_infos, OrtNode** context_nodes) noexcept {
    auto& ep = *static_cast<Ep*>(self);
    return guard(ep.api_, ort::ORT_FAIL,
                 [&] { ep.compile(graphs, fused_nodes, count, compute_infos, context_nodes); });
  };
  ReleaseNodeComputeInfos = [](OrtEp* /*self*/, ort::OrtNodeComputeInfo** compute_infos,
                               std::size_t count) noexcept {
    for (std::size_t i = 0; i < count; ++i) delete static_cast<ComputeInfo*>(compute_infos[i]);
  };
  GetCompiledModelCompatibilityInfo = [](OrtEp* self, const OrtGraph* /*graph*/) noexcept {
    return static_cast<const Ep*>(self)->compatibility_.c_str();
  };
  OnRunStart = [](OrtEp* self, const OrtRunOptions* options) noexcept {
    auto& ep = *static_cast<Ep*>(self);
    return guard(ep.api_, ort::ORT_FAIL, [&] { ep.termination_.begin(options); });
  };
  OnRunEnd = [](OrtEp* self, const OrtRunOptions* /*options*/,
                bool /*sync_stream*/) noexcept -> OrtStatus* {
    static_cast<Ep*>(self)->termination_.end();
    return nullptr;
  };
  CreateProfiler = [](OrtEp* self, ort::OrtEpProfilerImpl** profiler) noexcept {
    const auto& ep = *static_cast<const Ep*>(self);
    return guard(ep.api_, ort::ORT_FAIL, [&] {
      *profiler =
          make_profiler(ep.api_, ep.device_ == nullptr ? "" : std::string(ep.device_->name()));
    });
  };
  OnSessionInitializationEnd = [](OrtEp* self) noexcept {
    auto& ep = *static_cast<Ep*>(self);
    return guard(ep.api_, ort::ORT_FAIL, [&] { ep.on_session_ready(); });
  };
}

void Ep::get_capability(const OrtGraph* graph, OrtEpGraphSupportInfo* support) {
  const OrtNode* parent = nullptr;
  api_.call(ort::Graph_GetParentNode, graph, &parent);
  const bool is_body = parent != nullptr;
  const std::vector<GraphNode> nodes = read_graph(api_, graph);
  if (is_body && !is_control_flow(api_, parent)) {
    // Other operators with subgraphs, such as BeamSearch, are left to ORT with these.
    Placement ignored;
    add_bodies(nodes, ignored);
    return;
  }
  if (!is_body) model_name_ = utf8_of(path_of(model_path(api_, graph)).stem());
  if (!setup_error_.empty()) {
    claim_to_fail(nodes, support);
    return;
  }
  const bool is_priced = options_.claim == Claim::kWorthwhile && device_->name() == "cpu" &&
                         options_.on_unsupported != OnUnsupported::kError;
  Partitions partitions =
      partition(*device_, nodes,
                is_priced ? left_nodes(*device_, nodes, options_.device_options.cpu_isa)
                          : std::vector<std::string>());
  if (is_priced) leave_small(nodes, partitions, is_body);
  if (!is_body && context_.enable) setup_error_ = lost_constant(nodes, partitions);
  if (!setup_error_.empty()) {
    claim_to_fail(nodes, support);
    return;
  }
  // ORT writes compiled models with the bodies as they were, and asks again when it loads them.
  if (is_body && context_.enable) partitions.taken.clear();
  Placement& placed = place(nodes, partitions, is_body);
  obstacle_ = obstacle(graph, nodes, partitions);
  for (const std::vector<std::size_t>& taken : partitions.taken) {
    std::vector<const OrtNode*> handles;
    handles.reserve(taken.size());
    for (const std::size_t index : taken) handles.push_back(nodes[index].handle);
    claim(handles, support);
  }
  if (options_.on_unsupported == OnUnsupported::kError) {
    claim_rejected(nodes, partitions, placed, support);
  } else if (!is_body && !reports_when_ready() && partitions.taken.empty() &&
             placed.partitions > 0) {
    report_placement();  // ORT calls Compile for bodies alone.
  }
}

// Counts what is taken of a graph, and adds what was counted for its bodies.
Placement& Ep::place(const std::vector<GraphNode>& nodes, const Partitions& partitions,
                     bool is_body) {
  Placement placed = count_nodes(nodes, partitions);
  placed.device = placement_.device;
  placed.why = placement_.why;
  add_bodies(nodes, placed);
  for (const auto& [index, reason] : partitions.rejected) {
    const Node& node = nodes[index].node;
    if (node.domain == kDomain)
      rejected_operators_.push_back({to_string(node), node.op_type, reason});
  }
  if (is_body) return bodies_.emplace_back(std::move(placed));
  bodies_.clear();
  if (!first_left_) first_left_ = LeftNodes{placed.nodes, placed.left};
  return placement_ = std::move(placed);
}

// Adds what was counted for the graph's bodies, the last that ORT asked for, and forgets it.
void Ep::add_bodies(const std::vector<GraphNode>& nodes, Placement& placed) {
  const std::vector<std::int64_t> runs = runs_of_bodies(nodes);
  // Before it inlines functions, ORT asks only for the graphs that call some.
  const auto asked = static_cast<std::ptrdiff_t>(std::min(runs.size(), bodies_.size()));
  const auto first = bodies_.end() - asked;
  for (std::ptrdiff_t i = 0; i < asked; ++i) placed.add_body(first[i], runs.end()[i - asked]);
  bodies_.erase(first, bodies_.end());
}

// With on_unsupported=error: claims nodes so that the session fails if nodes are left.
void Ep::claim_rejected(const std::vector<GraphNode>& nodes, const Partitions& partitions,
                        const Placement& placed, OrtEpGraphSupportInfo* support) const {
  // FlowNPU's own operators are claimed nevertheless. Otherwise ORT would replace them by their
  // definitions, and the error would be about nodes that the user's model does not have.
  bool claimed = !partitions.taken.empty();
  for (const auto& [index, reason] : partitions.rejected) {
    if (nodes[index].node.domain != kDomain) continue;
    claim({nodes[index].handle}, support);
    claimed = true;
  }
  // ORT may still replace an operator that the device does not know by the function that defines
  // it. Newer versions call OnSessionInitializationEnd, where the session fails if it is left then,
  // and bodies wait for the model's graph, so that the error lists all nodes.
  const std::vector<Contract> contracts = device_->contracts();
  const bool may_change =
      reports_when_ready() &&
      (!bodies_.empty() || std::ranges::any_of(placed.left, [&](const Placement::Left& left) {
        return std::ranges::find(contracts, left.op_type, &Contract::op_type) == contracts.end();
      }));
  if (!claimed && !placed.left.empty() && !may_change) claim_to_fail(nodes, support);
}

// The result of Device::obstacle for the whole graph, if some nodes are not taken and the session
// continues without them; else empty.
std::string Ep::obstacle(const OrtGraph* graph, const std::vector<GraphNode>& nodes,
                         const Partitions& partitions) const {
  if (partitions.rejected.empty() || options_.on_unsupported == OnUnsupported::kError) return "";
  std::vector<Judged> judged;
  judged.reserve(nodes.size());
  std::vector<std::string> outputs = output_names(api_, graph);
  for (const GraphNode& node : nodes) {
    judged.push_back({node.node, ""});
    outputs.insert(outputs.end(), node.implicit_inputs.begin(), node.implicit_inputs.end());
  }
  for (const auto& [index, reason] : partitions.rejected) judged[index].reason = reason;
  return device_->obstacle(std::move(judged), outputs);
}

// Claims any node that can be claimed, so that ORT calls Compile, which then fails.
void Ep::claim_to_fail(const std::vector<GraphNode>& nodes, OrtEpGraphSupportInfo* support) const {
  const auto node = std::ranges::find_if(nodes, [](const GraphNode& candidate) {
    return !candidate.has_subgraphs && !candidate.is_elsewhere &&
           is_known_domain(candidate.node.domain);
  });
  if (node != nodes.end()) claim({node->handle}, support);
}

void Ep::claim(const std::vector<const OrtNode*>& nodes, OrtEpGraphSupportInfo* support) const {
  ort::OrtNodeFusionOptions options;
  options.ort_version_supported = api_.version();
  // A compiled model stores the constants in the partition's file.
  options.drop_constant_initializers = context_.enable;
  api_.call(ort::EpGraphSupportInfo_AddNodesToFuse, support, nodes.data(), nodes.size(), &options);
}

void Ep::compile(const OrtGraph** graphs, const OrtNode** fused_nodes, std::size_t count,
                 ort::OrtNodeComputeInfo** compute_infos, OrtNode** context_nodes) {
  const bool is_body = !bodies_.empty();
  // One error lists what all bodies leave, once the model's graph has been asked for: until then
  // they get nodes that never run.
  if (is_body && !reports_when_ready()) {
    placement_.nodes = 0;
    placement_.left.clear();
    for (const Placement& body : bodies_) placement_.add_body(body, 1);
  }
  if (!is_body || !reports_when_ready() || !setup_error_.empty()) check();
  const bool fails =
      is_body && options_.on_unsupported == OnUnsupported::kError && !bodies_.back().left.empty();
  std::vector<std::unique_ptr<ComputeInfo>> compiled;
  compiled.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    compiled.push_back(
        fails ? std::make_unique<ComputeInfo>(api_, nullptr, nullptr, termination_, true)
              : compile(graphs[i], fused_nodes[i], &context_nodes[i]));
  }
  if (!is_body) report_placement();
  for (std::size_t i = 0; i < count; ++i) compute_infos[i] = compiled[i].release();
}

std::unique_ptr<ComputeInfo> Ep::compile(const OrtGraph* graph, const OrtNode* fused,
                                         OrtNode** context_node) {
  std::vector<Node> nodes;
  for (GraphNode& node : read_graph(api_, graph)) nodes.push_back(std::move(node.node));
  Placement& placed = bodies_.empty() ? placement_ : bodies_.back();
  std::unique_ptr<CpuProvider> elsewhere = this->elsewhere(nodes, graph, fused);
  try {
    std::vector<Product> products;  // compiling changes the nodes
    products.reserve(nodes.size());
    for (const Node& node : nodes) products.push_back(product_of(node));
    CompiledPartition partition = compile_nodes(nodes, graph, fused, context_node);
    // The plan's are for one row.
    placed.our_multiply_adds += partition.multiply_adds;
    for (const Product& product : products)
      placed.our_multiply_adds += product.multiply_adds * (product.rows - 1);
    for (const Lowered::OnHost& item : partition.on_host)
      placed.on_host.push_back({item.node, item.op_type, item.reason});
    if (!partition.summary.empty()) placed.lowered.push_back(partition.summary);
    if (!partition.why_whole.empty()) placed.whole_prompts.push_back(partition.why_whole);
    const bool is_whole = bodies_.empty() && placed.left.empty() && placed.elsewhere == 0 &&
                          placed.control_flow.empty();
    return std::make_unique<ComputeInfo>(api_, std::move(partition.plan), std::move(elsewhere),
                                         termination_, !is_whole);
  } catch (const Error& error) {
    // The CPU device took each node, but not all of them together, so ORT's CPU provider runs them.
    // Failures of other devices are not hidden like this.
    if (elsewhere == nullptr || device_->name() != "cpu") throw;
    for (const Node& node : nodes) {
      placed.left.push_back({to_string(node), node.op_type, error.what()});
      count_left(node, placed);
    }
    return std::make_unique<ComputeInfo>(api_, nullptr, std::move(elsewhere), termination_, true);
  }
}

// The partition on ORT's CPU provider, for runs that the device does not take. Null with
// on_unsupported=error. Null also for compiled models: ORT does not know their nodes, and their
// constants are not in the session.
std::unique_ptr<CpuProvider> Ep::elsewhere(const std::vector<Node>& nodes, const OrtGraph* graph,
                                           const OrtNode* fused) const {
  if (options_.on_unsupported == OnUnsupported::kError || context_.enable ||
      !CpuProvider::knows(nodes)) {
    return nullptr;
  }
  return std::make_unique<CpuProvider>(api_, nodes, input_names(api_, fused),
                                       output_names(api_, fused), operator_sets(api_, graph),
                                       options_.device_options.threads);
}

CompiledPartition Ep::compile_nodes(std::vector<Node> nodes, const OrtGraph* graph,
                                    const OrtNode* fused, OrtNode** context_node) {
  const std::filesystem::path path = path_of(model_path(api_, graph));
  const bool in_current = !path.empty() && !path.has_parent_path();
  const Lowering lowering{.model_folder = in_current ? "." : utf8_of(path.parent_path()),
                          .outputs = output_names(api_, fused),
                          .obstacle = obstacle_};
  const std::string files = context_files(nodes);
  nodes = expand_contexts(std::move(nodes), context_, lowering, *device_);
  KeepNodes keep;
  if (context_.enable) {
    keep = [&](const std::vector<Node>& lowered) {
      const std::string compatibility = device_->compatibility(lowering);
      compatibility_ = context_compatibility(compatibility);
      *context_node = write_context(api_, context_, utf8_of(path), partitions_kept_++, fused,
                                    compatibility, lowered);
    };
  }
  try {
    return compile_partition(device_, options_, std::move(nodes), input_names(api_, fused),
                             lowering, keep);
  } catch (const Error& error) {
    if (files.empty()) throw;
    fail("[FlowNPU] the compiled partition ", files, ": ", error.what());
  }
}

void Ep::on_session_ready() {
  if (reported_) return;  // Compile was called
  check();
  report_placement();
}

void Ep::check() const {
  if (!setup_error_.empty()) throw Error(setup_error_);
  if (options_.on_unsupported != OnUnsupported::kError || placement_.left.empty()) return;
  const auto [nodes, left] = left_in_model();
  fail("[FlowNPU] device ", device_->name(), " does not take ", left.size(), " of the model's ",
       nodes, " nodes:\n", list(left, kListed),
       "\nTo leave these to ONNX Runtime's CPU provider, set the provider option on_unsupported to "
       "warn or cpu.");
}

// The nodes that are left, but for a node of a function's body the function's node, which is what
// the user's model has.
Ep::LeftNodes Ep::left_in_model() const {
  const auto is_in = [](const std::vector<Placement::Left>& list) {
    return [&list](const Placement::Left& left) {
      return std::ranges::find(list, left.node, &Placement::Left::node) != list.end();
    };
  };
  LeftNodes found = first_left_.value_or(LeftNodes());
  if (std::ranges::all_of(placement_.left, is_in(found.left)))
    std::erase_if(found.left, std::not_fn(is_in(placement_.left)));
  return found.left.empty() ? LeftNodes{placement_.nodes, placement_.left} : found;
}

// FlowNPU's rejected operators that ORT has replaced by their definitions since.
std::vector<Placement::Left> Ep::inlined_nodes() const {
  std::vector<Placement::Left> inlined;
  for (const Placement::Left& operator_node : rejected_operators_) {
    const auto is_node = [&](const Placement::Left& other) {
      return other.node == operator_node.node;
    };
    if (std::ranges::none_of(placement_.left, is_node) && std::ranges::none_of(inlined, is_node)) {
      inlined.push_back(operator_node);
    }
  }
  return inlined;
}

std::string Ep::placement_path() const {
  if (!options_.placement.ends_with('/')) return options_.placement;
  return options_.placement + (model_name_.empty() ? "model" : model_name_) + ".json";
}

void Ep::report_placement() {
  reported_ = true;
  placement_.device = device_->description();  // compiling may have changed it
  placement_.inlined = inlined_nodes();
  const std::string line = summary(placement_);
  std::vector<Placement::Left> not_taken = placement_.left;
  not_taken.insert(not_taken.end(), placement_.inlined.begin(), placement_.inlined.end());
  not_taken.insert(not_taken.end(), placement_.on_host.begin(), placement_.on_host.end());
  const bool warn = options_.on_unsupported == OnUnsupported::kWarn && !not_taken.empty();
  std::string message = line;
  if (!not_taken.empty()) message.append("\n").append(list(not_taken, kListed));
  api_.log(logger_, warn ? ort::ORT_LOGGING_LEVEL_WARNING : ort::ORT_LOGGING_LEVEL_INFO, message);
  if (const std::string warning = device_->warning(); !warning.empty())
    api_.log(logger_, ort::ORT_LOGGING_LEVEL_WARNING, "FlowNPU: " + warning);
  if (options_.placement == "stderr") {
    std::fprintf(stderr, "%s\n", as_utf8(line).c_str());
  } else if (!options_.placement.empty()) {
    write_report(placement_path(), to_json(placement_));
  }
}

}  // namespace flownpu
