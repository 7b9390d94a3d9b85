// SPDX-License-Identifier: Apache-2.0
#include "ep/compile/compiler.h"

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "ep/compile/placement.h"
#include "ops/error.h"
#include "ops/system/machine_limits.h"
#include "ops/transformer/paged.h"
#include "ops/transformer/staged_device.h"

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

// The places of the decoder's present keys and values among the partition's outputs; empty if the
// nodes have no decoder, or one with paged caches, which one device keeps. States, which follow
// them, are tensors on both devices.
std::vector<std::size_t> presents_of(const std::vector<Node>& nodes,
                                     const std::vector<std::string>& outputs) {
  std::vector<std::size_t> places;
  const auto decoder = std::ranges::find(nodes, transformer::kDecoderLayers, &Node::op_type);
  if (decoder == nodes.end() || decoder->integer(transformer::kPaged, 0) != 0) return places;
  const std::size_t parts = 2 * transformer::Decoder::read(*decoder).attentions();
  for (std::size_t i = transformer::kFirstPresent; i < transformer::kFirstPresent + parts; ++i) {
    const auto found = std::ranges::find(outputs, decoder->outputs[i].name);
    if (found == outputs.end())
      fail("[FlowNPU] expected present keys and values that leave the model, got '",
           decoder->outputs[i].name, "', which does not: use one device");
    places.push_back(static_cast<std::size_t>(found - outputs.begin()));
  }
  return places;
}

// The bytes of the nodes' constants.
std::size_t weight_bytes(const std::vector<Node>& nodes) {
  std::map<const void*, std::size_t> bytes;
  for (const Node& node : nodes) {
    for (const Value& input : node.inputs) {
      if (input.constant != nullptr && input.shape)
        bytes[input.constant] = bytes_of(input.type, *input.shape);
    }
  }
  std::size_t sum = 0;
  for (const auto& [constant, size] : bytes) sum += size;
  return sum;
}

// The sentence about the memory that two devices need for the weights. Throws Error if the machine
// has less.
std::string price_of_copies(const transformer::StagedDevice& device, std::size_t weights) {
  const std::size_t copies = device.weight_copies();
  const std::size_t needed = weights * (1 + copies);
  std::size_t memory = machine_memory();
  if (const auto limit = memory_limit())
    memory = std::min(memory, static_cast<std::size_t>(limit->value));
  if (needed > memory) {
    fail("[FlowNPU] device ", device.name(), " needs the weights ", 1 + copies, " times, ", needed,
         " bytes, and there are ", memory, ": use one of the two devices");
  }
  const std::string_view more = copies == 0   ? ""
                                : copies == 1 ? " and once more in a device's memory"
                                              : " and in the memory of each device";
  return "weights of " + std::to_string(weights) + " bytes in the file's pages" + std::string(more);
}

// The plan of the device that computes the other stage; adds to `lowered` what the report says.
std::unique_ptr<const ExecutionPlan> plan_other_stage(const transformer::StagedDevice& staged,
                                                      const Options& options,
                                                      std::vector<Node> nodes,
                                                      const std::vector<std::string>& inputs,
                                                      const Lowering& lowering, Lowered& lowered) {
  const std::size_t weights = weight_bytes(nodes);
  Lowered other = staged.other()->lower(std::move(nodes), lowering);
  lowered.summary += "; " + price_of_copies(staged, weights);
  if (!other.on_host.empty()) {
    if (options.on_unsupported == OnUnsupported::kError)
      refuse_host(*staged.other(), other.on_host);
    lowered.on_host.insert(lowered.on_host.end(), other.on_host.begin(), other.on_host.end());
  }
  if (!other.summary.empty())
    lowered.summary += "; " + std::string(staged.other()->name()) + ": " + other.summary;
  return std::make_unique<ExecutionPlan>(staged.other(), std::move(other.nodes), inputs,
                                         lowering.outputs);
}

}  // namespace

CompiledPartition compile_partition(const std::shared_ptr<const Device>& device,
                                    const Options& options, std::vector<Node> nodes,
                                    const std::vector<std::string>& inputs,
                                    const Lowering& lowering, const KeepNodes& keep) {
  Lowered lowered = device->lower(nodes, lowering);
  if (options.on_unsupported == OnUnsupported::kError && !lowered.on_host.empty())
    refuse_host(*device, lowered.on_host);

  const auto staged = std::dynamic_pointer_cast<const transformer::StagedDevice>(device);
  if (staged != nullptr && (keep || has_devices_own(nodes)))
    fail("[FlowNPU] device ", device->name(), " takes models that are not compiled for a device, ",
         "and compiles none: load the model itself, or use one device");
  const std::vector<std::size_t> presents =
      staged == nullptr ? std::vector<std::size_t>() : presents_of(lowered.nodes, lowering.outputs);
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
  if (!presents.empty())
    other = plan_other_stage(*staged, options, nodes, inputs, lowering, lowered);
  else if (may_be_the_cpus && options.on_unsupported == OnUnsupported::kCpu)
    other = on_cpu();
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
  if (presents.empty() || other == nullptr) {
    compiled.plan = std::make_unique<PlanWithFallback>(device, std::move(plan), std::move(other));
    return compiled;
  }
  staged->share_caches();
  compiled.plan =
      std::make_unique<PlanWithFallback>(staged, std::move(plan), std::move(other), presents,
                                         options.on_unsupported == OnUnsupported::kCpu);
  return compiled;
}

}  // namespace flownpu
