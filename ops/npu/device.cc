// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/device.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "ops/cpu/step.h"
#include "ops/error.h"
#include "ops/npu/driver/xrt_plugin.h"
#include "ops/npu/match/convolution.h"
#include "ops/npu/match/layers.h"
#include "ops/npu/operators/lowering.h"
#include "ops/npu/operators/steps.h"
#include "ops/npu/run/decoder_layers.h"
#include "ops/npu/run/encoder_layers.h"
#include "ops/system/library.h"
#include "ops/system/paths.h"
#include "ops/transformer/graph/operators.h"

namespace flownpu {
namespace npu {
namespace {

// Versions of the layouts of lowered nodes' packed constants and attributes: nodes that another
// version kept in a file are lowered anew.
constexpr std::string_view kLayout = "decoder layers 5, encoder layers 1, operators 1";

}  // namespace

NpuDevice::NpuDevice(const DeviceOptions& options, bool emulated)
    : DeviceWithHost(options),
      emulated_(emulated),
      host_compute_{&cpu::select_kernels(options.cpu_isa),
                    cpu::ThreadPool::shared(options.threads)} {}

std::string NpuDevice::description() const {
  const std::lock_guard lock(mutex_);
  const std::string array = designs_ == nullptr ? "" : designs_->runtime().description() + "; ";
  return std::string(name()) + " (" + array + "host: " + host().description() + ")";
}

std::string NpuDevice::warning() const {
  if (!emulated_) return host().warning();
  return "device = emulate computes what an NPU would, element by element, to test it: it is "
         "many times slower than one, and than device = cpu";
}

std::string NpuDevice::unsupported(const Node& node, const Producer& producer) const {
  return is_layers(node) || is_operator_on_array(node) ? "" : host().unsupported(node, producer);
}

// Beside the model, unless the option `artifacts` names a folder.
std::string NpuDevice::folder(const std::string& model_folder) const {
  if (!options().artifacts.empty()) return options().artifacts;
  if (model_folder.empty()) {
    fail_device(Failure::kArtifact,
                "expected the compiled designs of this model beside it, and it was not read from a "
                "file: set the provider option artifacts to their folder");
  }
  return utf8_of(path_of(model_folder) / "artifacts" / (emulated_ ? "emulate" : "npu2"));
}

std::shared_ptr<CompiledDesigns> NpuDevice::open(const std::string& model_folder) const {
  const std::lock_guard lock(mutex_);
  if (designs_ == nullptr) designs_ = CompiledDesigns::open(folder(model_folder), emulated_);
  return designs_;
}

std::unique_ptr<Step> NpuDevice::prepare(const Node& node) const {
  const bool is_alone = is_operator_on_array(node);
  if (!is_layers(node) && !is_alone) return host().prepare(node);
  const std::shared_ptr<CompiledDesigns> designs = open("");
  try {
    if (is_alone) return prepare_operator(node, designs);
    if (is_encoder_layers(node))
      return std::make_unique<EncoderLayers>(node, designs, host_compute_);
    auto step = std::make_unique<DecoderLayers>(node, designs, host_compute_,
                                                cpu::make_context(options()), host());
    caches().add(step->caches());
    return step;
  } catch (const DeviceError& error) {
    if (error.failure() != Failure::kMemory) throw;
    throw DeviceError(error.failure(), std::string(error.what()) + " (the designs in " +
                                           designs->artifacts().folder() + " ask for it)");
  }
}

std::unique_ptr<Step> NpuDevice::prepare_operator(
    const Node& node, const std::shared_ptr<CompiledDesigns>& designs) const {
  const Node of_graph = operator_of_graph(node);
  // Throws Error for a node that the operator's contract does not take.
  std::unique_ptr<Step> on_host = host().prepare(of_graph);
  const cpu::Context context = cpu::make_context(options());
  const auto programs_of = [&](const Node& of) {
    return std::make_unique<OperatorPrograms>(of, designs, shared_, host_compute_,
                                              threshold().rows);
  };
  if (transformer::is(of_graph, kDomain, "Q4NXMoE"))
    return make_mixture_step(node, programs_of, context);
  if (transformer::is_attention(of_graph))
    return make_attention_step(node, programs_of(node), context);
  if (is_convolution(of_graph))
    return make_convolution_step(of_graph, programs_of(node), std::move(on_host), context);
  return make_product_step(node, programs_of(node), std::move(on_host), context);
}

Threshold NpuDevice::threshold() const {
  if (const auto& given = options().npu_threshold) return {.rows = *given, .one_row = *given};
  return default_threshold(options().activations, cpu::make_context(options()).pool->threads());
}

std::string NpuDevice::describe(const std::vector<Node>& nodes,
                                const std::string& model_folder) const {
  const Node& layers = *std::ranges::find_if(nodes, is_layers);
  const std::shared_ptr<CompiledDesigns> designs = open(model_folder);
  return is_encoder_layers(layers) ? describe_encoder(layers, *designs)
                                   : describe_decoder(layers, *designs);
}

Lowered NpuDevice::lower(std::vector<Node> nodes, const Lowering& lowering) const {
  Lowered lowered = DeviceWithHost::lower(std::move(nodes), lowering);
  const bool before = std::ranges::any_of(lowered.nodes, is_operator_on_array);
  if (!before && std::ranges::none_of(lowered.nodes, is_operator)) return lowered;
  try {
    lower_operators(lowered, open(lowering.model_folder)->artifacts(), threshold());
  } catch (const DeviceError& error) {
    if (before) throw;
    // If there are artifacts, a fault in them is a better reason than a graph without a decoder.
    const bool known = !options().artifacts.empty() || !lowering.model_folder.empty();
    const bool there = known && Artifacts::are_in(folder(lowering.model_folder));
    leave_operators(lowered, error.what(), there);
  }
  return lowered;
}

std::string compatible_layout(std::string_view device) {
  return std::string(device).append(", ").append(kLayout);
}

std::string NpuDevice::compatibility(const Lowering& lowering) const {
  return compatible_layout(name()) + ", artifacts " +
         open(lowering.model_folder)->artifacts().identity();
}

Counts NpuDevice::counts() const {
  const std::lock_guard lock(mutex_);
  return designs_ == nullptr ? Counts{} : designs_->runtime().counts();
}

}  // namespace npu

bool npu_built_in() {
  return std::filesystem::exists(own_folder() / library_file(npu::kXrtPlugin));
}

std::unique_ptr<Device> make_npu_device(const DeviceOptions& options) {
  npu::require_npu_system();
  return std::make_unique<npu::NpuDevice>(options, false);
}

std::unique_ptr<Device> make_emulate_device(const DeviceOptions& options) {
  return std::make_unique<npu::NpuDevice>(options, true);
}

}  // namespace flownpu
