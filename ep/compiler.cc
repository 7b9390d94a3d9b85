// SPDX-License-Identifier: Apache-2.0
#include "ep/compiler.h"

#include <algorithm>
#include <utility>

#include "ep/placement.h"
#include "ops/error.h"

namespace flownpu {
namespace {

// Nodes that an error lists one by one.
constexpr std::size_t kListed = 20;

bool has_packed(const std::vector<Node>& nodes) {
  return std::ranges::any_of(nodes, [](const Node& node) { return !node.packed.empty(); });
}

void refuse_host(const Device& device, const std::vector<Lowered::OnHost>& on_host) {
  std::vector<Placement::Left> left;
  for (const Lowered::OnHost& item : on_host)
    left.push_back({item.node, item.op_type, item.reason});
  fail("[FlowNPU] device ", device.name(), " leaves ", left.size(),
       " of the model's operators to its host, the CPU:\n", list(left, kListed),
       "\nTo have them computed there, set the provider option on_unsupported to warn or cpu.");
}

}  // namespace

CompiledPartition compile_partition(const std::shared_ptr<const Device>& device,
                                    const Options& options, std::vector<Node> nodes,
                                    const std::vector<std::string>& inputs,
                                    const std::vector<std::string>& outputs,
                                    const Lowering& lowering, const KeepNodes& keep) {
  Lowering whole = lowering;
  whole.outputs = outputs;
  Lowered lowered = device->lower(nodes, whole);
  if (options.on_unsupported == OnUnsupported::kError && !lowered.on_host.empty())
    refuse_host(*device, lowered.on_host);

  if (keep) keep(lowered.nodes);

  // What has constants of the device's own is on the device, which may fail.
  std::unique_ptr<const Program> other;
  if (options.on_unsupported == OnUnsupported::kCpu && has_packed(lowered.nodes)) {
    other = std::make_unique<Program>(make_cpu_device(options.device_options), std::move(nodes),
                                      inputs, outputs);
  }
  auto program = std::make_unique<Program>(device, std::move(lowered.nodes), inputs, outputs);
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
