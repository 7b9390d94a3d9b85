// SPDX-License-Identifier: Apache-2.0
#include "ep/compile/compiler.h"

#include <algorithm>
#include <string>
#include <utility>

#include "ep/compile/placement.h"
#include "ops/error.h"

namespace flownpu {
namespace {

// How many nodes an error lists one by one.
constexpr std::size_t kListed = 20;

// Whether a device made this node for itself: its domain is then "ai.flownpu." with a suffix.
bool is_devices_own(const Node& node) {
  return node.domain.starts_with(std::string(kDomain) + ".");
}

bool has_devices_own(const std::vector<Node>& nodes) {
  return std::ranges::any_of(nodes, is_devices_own);
}

// The device's own nodes; the reason is filled in later.
std::vector<Lowered::OnHost> devices_own(const std::vector<Node>& nodes) {
  std::vector<Lowered::OnHost> own;
  for (const Node& node : nodes) {
    if (is_devices_own(node)) own.push_back({to_string(node), node.op_type, ""});
  }
  return own;
}

// One line for each reason, because many nodes may share one: without an NPU, all operators do.
std::vector<Placement::Left> by_reason(const std::vector<Lowered::OnHost>& on_host) {
  std::vector<Placement::Left> lines;
  for (const Lowered::OnHost& item : on_host) {
    if (std::ranges::any_of(lines, [&](const auto& line) { return line.reason == item.reason; }))
      continue;
    const auto others = std::ranges::count(on_host, item.reason, &Lowered::OnHost::reason) - 1;
    const std::string more = others == 0 ? "" : " and " + std::to_string(others) + " others";
    lines.push_back({item.node + more, item.op_type, item.reason});
  }
  return lines;
}

void refuse_host(const Device& device, const std::vector<Lowered::OnHost>& on_host) {
  fail("[FlowNPU] device ", device.name(), " leaves ", on_host.size(),
       " of the model's operators to its host, the CPU:\n", list(by_reason(on_host), kListed),
       "\nTo have them computed there, set the provider option on_unsupported to warn or cpu.");
}

}  // namespace

CompiledPartition compile_partition(const std::shared_ptr<const Device>& device,
                                    const Options& options, std::vector<Node> nodes,
                                    const std::vector<std::string>& inputs,
                                    const Lowering& lowering, const KeepNodes& keep) {
  Lowered lowered = device->lower(nodes, lowering);
  if (options.on_unsupported == OnUnsupported::kError && !lowered.on_host.empty())
    refuse_host(*device, lowered.on_host);

  if (keep) keep(lowered.nodes);

  // The device may fail, now or in a run; the CPU can then take over unless the partition is from a
  // compiled model, which only has the device's own nodes.
  const bool may_be_the_cpus = options.on_unsupported != OnUnsupported::kError &&
                               has_devices_own(lowered.nodes) && !has_devices_own(nodes);
  const auto on_cpu = [&] {
    const std::shared_ptr<const Device> cpu = make_cpu_device(options.device_options);
    return std::make_unique<ExecutionPlan>(cpu, cpu->lower(std::move(nodes), lowering).nodes,
                                           inputs, lowering.outputs);
  };
  std::unique_ptr<const ExecutionPlan> other;
  if (may_be_the_cpus && options.on_unsupported == OnUnsupported::kCpu) other = on_cpu();
  std::unique_ptr<const ExecutionPlan> plan;
  std::vector<Lowered::OnHost> own = devices_own(lowered.nodes);
  try {
    plan =
        std::make_unique<ExecutionPlan>(device, std::move(lowered.nodes), inputs, lowering.outputs);
  } catch (const DeviceFailed& error) {
    if (!may_be_the_cpus) throw;
    plan = other == nullptr ? on_cpu() : std::move(other);
    for (Lowered::OnHost& node : own) node.reason = error.what();
    lowered.on_host = std::move(own);
    lowered.summary.clear();
  }
  CompiledPartition compiled;
  compiled.multiply_adds = plan->multiply_adds();
  compiled.why_whole = plan->why_whole();
  compiled.on_host = std::move(lowered.on_host);
  compiled.summary = std::move(lowered.summary);
  compiled.plan = std::make_unique<PlanWithFallback>(device, std::move(plan), std::move(other));
  return compiled;
}

}  // namespace flownpu
