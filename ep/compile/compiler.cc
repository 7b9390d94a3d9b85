// SPDX-License-Identifier: Apache-2.0
#include "ep/compile/compiler.h"

#include <algorithm>
#include <string>
#include <utility>

#include "ep/compile/placement.h"
#include "ops/error.h"

namespace flownpu {
namespace {

// Nodes that an error lists one by one.
constexpr std::size_t kListed = 20;

// Nodes that a device made for itself: in a domain of its own beside ours.
bool has_devices_own(const std::vector<Node>& nodes) {
  const std::string beside = std::string(kDomain) + ".";
  return std::ranges::any_of(nodes,
                             [&](const Node& node) { return node.domain.starts_with(beside); });
}

// One line for each reason: an NPU that is not there has the same for all operators.
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

  // What is on the device may fail. A compiled model has the device's nodes only.
  std::unique_ptr<const Program> other;
  if (options.on_unsupported == OnUnsupported::kCpu && has_devices_own(lowered.nodes) &&
      !has_devices_own(nodes)) {
    const std::shared_ptr<const Device> cpu = make_cpu_device(options.device_options);
    other = std::make_unique<Program>(cpu, cpu->lower(std::move(nodes), lowering).nodes, inputs,
                                      lowering.outputs);
  }
  auto program =
      std::make_unique<Program>(device, std::move(lowered.nodes), inputs, lowering.outputs);
  CompiledPartition compiled;
  compiled.multiply_adds = program->multiply_adds();
  compiled.why_whole = program->why_whole();
  compiled.on_host = std::move(lowered.on_host);
  compiled.summary = std::move(lowered.summary);
  compiled.program =
      std::make_unique<ResilientProgram>(device, std::move(program), std::move(other));
  return compiled;
}

}  // namespace flownpu
