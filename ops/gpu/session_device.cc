// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/session_device.h"

#include <algorithm>
#include <utility>

#include "ops/error.h"
#include "ops/gpu/decoder/lowering.h"
#include "ops/gpu/decoder/step.h"
#include "ops/gpu/open_context.h"
#include "ops/gpu/operators/host_step.h"
#include "ops/gpu/operators/lowering.h"
#include "ops/gpu/operators/step.h"

namespace flownpu {
namespace gpu {
namespace {

// Version of the order of a lowered node's constants: nodes that another version kept in a file are
// lowered anew.
constexpr std::string_view kLayout = "decoder layers 1, operators 2";

}  // namespace

std::shared_ptr<Context> SessionDevice::open() const {
  const std::lock_guard lock(mutex_);
  if (context_ == nullptr) {
    context_ = open_context(options());
    context_->set_takes_times(false);
  }
  return context_;
}

std::shared_ptr<Context> SessionDevice::opened() const {
  const std::lock_guard lock(mutex_);
  return context_;
}

std::string SessionDevice::description() const {
  const std::shared_ptr<Context> context = opened();
  const std::string device =
      context == nullptr ? ""
                         : context->facts().title() + ", driver " + context->facts().driver + "; ";
  return "gpu (" + device + "host: " + host().description() + ")";
}

std::string SessionDevice::warning() const {
  const std::shared_ptr<Context> context = opened();
  return context == nullptr ? host().warning() : context->facts().warning();
}

std::string SessionDevice::absent() const {
  try {
    open();
    return "";
  } catch (const GpuError& error) {
    return error.what();
  }
}

std::string SessionDevice::unsupported(const Node& node, const Producer& producer) const {
  return is_own(node) ? "" : host().unsupported(node, producer);
}

std::unique_ptr<Step> SessionDevice::prepare(const Node& node) const {
  if (!is_own(node)) {
    std::unique_ptr<Step> step = host().prepare(node);
    const std::shared_ptr<Context> context = opened();
    if (context == nullptr) return step;
    return std::make_unique<HostStep>(node, context, std::move(step));
  }
  const std::shared_ptr<Context> context = open();
  if (is_operator_alone(node)) {
    const Node of_graph = operator_of_graph(node);
    return find_operator(of_graph.domain, of_graph.op_type)
        ->make(of_graph, {.context = context,
                          .host = host().prepare(of_graph),
                          .activations = options().activations,
                          .weights = options().gpu_weights,
                          .matrices = options().gpu_matrices,
                          .winograd = options().gpu_winograd,
                          .host_context = cpu::make_context(options()),
                          .tokens_on_host = true});
  }
  const std::lock_guard lock(context->mutex());
  auto step = std::make_unique<DecoderStep>(node, context, options());
  if (step->caches() != nullptr) caches().add(step->caches());
  if (step->paged() != nullptr) paged_.push_back(step->paged());
  return step;
}

Memory SessionDevice::allocate(std::size_t bytes) const {
  Memory memory = DeviceWithHost::allocate(bytes);
  const std::shared_ptr<Context> context = opened();
  if (context == nullptr) return memory;
  context->twins().add(memory.get(), bytes);
  auto release = memory.get_deleter();
  return {memory.release(), [context, release](std::byte* freed) {
            context->twins().remove(freed);
            release(freed);
          }};
}

bool SessionDevice::is_own(const Node& node) const {
  return is_decoder_layers(node) || is_operator_alone(node);
}

Lowered SessionDevice::lower_own(std::vector<Node> nodes,
                                 const std::vector<std::string>& outputs) const {
  if (is_without_cache(nodes)) return lower_operators(std::move(nodes));
  Lowered decoder = lower_decoder(nodes, outputs);
  if (decoder.on_host.empty() || std::ranges::any_of(decoder.nodes, is_decoder_layers))
    return decoder;
  // The host holds the caches of layers that are no node of the device's.
  Lowered lowered = lower_operators(std::move(nodes));
  lowered.summary = "operators by themselves, since " + decoder.on_host.front().reason;
  return lowered;
}

// Throws GpuError where there is no device; Error for one that has too little memory.
std::string SessionDevice::describe(const std::vector<Node>& nodes,
                                    const std::string& /*model_folder*/) const {
  const std::shared_ptr<Context> context = open();
  const auto layers = std::ranges::find_if(nodes, is_decoder_layers);
  return layers == nodes.end() ? describe_operators(nodes)
                               : describe_decoder(*layers, *context, options().gpu_dtype);
}

std::vector<Lowered::OnHost> SessionDevice::left_on_host(const std::vector<Node>& nodes,
                                                         const std::string& reason) const {
  return gpu::left_on_host(nodes, reason);
}

std::string SessionDevice::compatibility(const Lowering& /*lowering*/) const {
  return std::string(name()) + ", " + std::string(kLayout);
}

bool SessionDevice::copies_weights() const {
  const std::shared_ptr<Context> context = opened();
  return context == nullptr || !context->facts().is_software();
}

void SessionDevice::restore(std::span<const Tensor> tensors) const {
  const std::shared_ptr<Context> context = opened();
  if (context == nullptr) return;
  const std::lock_guard lock(context->mutex());
  try {
    caches().restore(tensors);
    for (const std::weak_ptr<PagedCaches>& one : paged_) {
      const std::shared_ptr<PagedCaches> paged = one.lock();
      for (std::size_t i = 0; i < tensors.size() && paged != nullptr; ++i)
        paged->restore(tensors[i]);
    }
  } catch (const GpuError& error) {
    fail(error.what(), ". Keys and values of this conversation were in the device's memory, and ",
         "are lost with it: begin the conversation anew");
  }
}

std::optional<Counts> SessionDevice::counts() const {
  const std::shared_ptr<Context> context = opened();
  if (context == nullptr) return std::nullopt;
  const std::lock_guard lock(context->mutex());
  return context->counts();
}

}  // namespace gpu

std::unique_ptr<Device> make_gpu_device(const DeviceOptions& options) {
  return std::make_unique<gpu::SessionDevice>(options);
}

}  // namespace flownpu
