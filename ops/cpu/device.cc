// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstdlib>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "ops/cpu/checked_step.h"
#include "ops/cpu/step.h"
#include "ops/error.h"
#include "ops/lowering/lowering.h"

namespace flownpu {
namespace {

constexpr std::align_val_t kAlignment{64};

// Rows of a prompt that are computed at once. The values between the steps of a layer should stay
// in the third-level cache: the widest, the gated product of a 1B model, is 768 x 6912 f32 = 21 MB,
// in a cache of 32 MB. Reading the weights again for each slice takes a hundredth of the time: 20
// ms of memory for 768 x 700 M multiply-adds. (384 to 1152 rows measure alike.)
constexpr std::int64_t kPromptRows = 768;
// Slices are cut in whole tiles of rows, which suits attention and the matrix products.
constexpr std::int64_t kTileRows = 64;

// Without these instructions the kernels are plain C++.
#if defined(__aarch64__)
constexpr const char* kFasterKernels = "dot products or products of int8 matrices";
#else
constexpr const char* kFasterKernels = "AVX2 or AVX-512";
#endif

auto operators_by_file() {
  return std::array{cpu::q4nx_operators(),
                    cpu::q4nx_moe_operators(),
                    cpu::flow_qkv_attention_operators(),
                    cpu::flow_kv_attention_operators(),
                    cpu::paged_attention_operators(),
                    cpu::normalization_operators(),
                    cpu::function_operators(),
                    cpu::arithmetic_operators(),
                    cpu::comparison_operators(),
                    cpu::cast_operators(),
                    cpu::where_operators(),
                    cpu::range_operators(),
                    cpu::reduce_operators(),
                    cpu::pool_operators(),
                    cpu::group_norm_operators(),
                    cpu::embed_layer_norm_operators(),
                    cpu::cumulative_operators(),
                    cpu::top_k_operators(),
                    cpu::shape_operators(),
                    cpu::reshape_operators(),
                    cpu::part_operators(),
                    cpu::choice_operators(),
                    cpu::scatter_operators(),
                    cpu::pad_operators(),
                    cpu::resize_operators(),
                    cpu::transpose_operators(),
                    cpu::dense_operators(),
                    cpu::gemm_operators(),
                    cpu::matmul_integer_operators(),
                    cpu::convolution_operators(),
                    cpu::quantization_operators(),
                    cpu::standard_attention_operators(),
                    cpu::rotary_embedding_operators(),
                    cpu::multi_axis_rotary_embedding_operators(),
                    cpu::causal_convolution_operators(),
                    cpu::linear_attention_operators(),
                    cpu::gate_operators()};
}

class CpuDevice final : public Device {
 public:
  explicit CpuDevice(const DeviceOptions& options) : context_(cpu::make_context(options)) {}

  std::string_view name() const override { return "cpu"; }

  std::string description() const override {
    const char* rounding = context_.activations == Activations::kInt8 ? "int8" : "bf16";
    const std::int64_t fewest = context_.kernels.fewest_tile_rows;
    const std::string from = fewest > 0 ? " from " + std::to_string(fewest) + " rows on" : "";
    return "cpu (" + std::string(context_.kernels.isa) + from + ", " +
           std::to_string(context_.pool->threads()) + " threads, " + rounding + " activations)";
  }

  std::string warning() const override {
    if (context_.kernels.isa != std::string_view("generic")) return "";
    const bool chosen = cpu::available_kernels().size() > 1;
    return std::string(
               "the plain C++ kernels compute, which are correct and many times slower "
               "than those for ") +
           kFasterKernels + ": " +
           (chosen ? "set the provider option cpu_isa to auto" : "this processor has neither");
  }

  std::string unsupported(const Node& node, const Producer& producer) const override {
    return reason_against(node, producer, violation);
  }

  std::string unsupported_in_file(const Node& node, const Producer& producer) const override {
    return reason_against(node, producer, violation_in_file);
  }

  std::vector<Contract> contracts() const override {
    std::vector<Contract> all;
    for (const auto operators : operators_by_file())
      for (const cpu::Operator& op : operators) all.push_back(op.contract);
    for (const Contract* contract : lowering::contracts()) all.push_back(*contract);
    return all;
  }

  Lowered lower(std::vector<Node> nodes, const Lowering& lowering) const override {
    return lowering::lower(std::move(nodes), lowering.outputs);
  }

  std::unique_ptr<Step> prepare(const Node& node) const override {
    return prepare(node, violation);
  }

  std::int64_t tokens_at_once(std::int64_t batch) const override {
    const std::int64_t tokens = kPromptRows / std::max<std::int64_t>(batch, 1);
    return std::max(tokens / kTileRows, std::int64_t{1}) * kTileRows;
  }

  void expect(std::span<const std::span<const std::byte>> streams) const override {
    context_.pool->expect(streams);
  }

  Memory allocate(std::size_t bytes) const override {
    return {static_cast<std::byte*>(::operator new(bytes, kAlignment)), release};
  }

  void wait() const override {}

 private:
  std::unique_ptr<Step> prepare(const Node& node, ContractCheck check) const {
    for (const auto operators : operators_by_file()) {
      for (const cpu::Operator& op : operators) {
        if (op.contract.op_type != node.op_type || op.contract.domain != node.domain) continue;
        if (std::string reason = check(op.contract, node); !reason.empty()) throw Error(reason);
        std::unique_ptr<Step> step = op.make(node, context_);
        if (!op.contract.has_shapes()) return step;
        return std::make_unique<cpu::CheckedStep>(op.contract, to_string(node), std::move(step));
      }
    }
    fail("the cpu device has no ", node.domain.empty() ? "ai.onnx" : node.domain,
         "::", node.op_type);
  }

  // The DequantizeLinear of constants that makes a convolution's weight, which lowering makes a
  // constant; null: none.
  static const Node* dequantized_weight(const Node& node, const Producer& producer) {
    const bool is_convolution = node.op_type == "Conv" || node.op_type == "FusedConv";
    const Value* weight = is_convolution ? node.input(1) : nullptr;
    if (weight == nullptr || weight->constant != nullptr || !producer) return nullptr;
    const Node* made = producer(weight->name);
    if (made == nullptr || made->op_type != "DequantizeLinear") return nullptr;
    const auto is_constant = [](const Value& v) { return v.name.empty() || v.constant != nullptr; };
    return std::ranges::all_of(made->inputs, is_constant) ? made : nullptr;
  }

  std::string reason_against(const Node& node, const Producer& producer,
                             ContractCheck check) const {
    try {
      if (const Node* made = dequantized_weight(node, producer); made != nullptr) {
        const Lowering alone{.model_folder = {}, .outputs = {node.outputs[0].name}};
        prepare(lower({*made, node}, alone).nodes.back(), check);
      } else {
        prepare(lowering::is_lowered(node) ? lowering::lowered_alone(node, producer, check) : node,
                check);
      }
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  }

  static void release(std::byte* memory) { ::operator delete(memory, kAlignment); }

  cpu::Context context_;
};

}  // namespace

cpu::Context cpu::make_context(const DeviceOptions& options) {
  return {select_kernels(options.cpu_isa), ThreadPool::shared(options.threads),
          options.activations};
}

std::unique_ptr<Device> make_cpu_device(const DeviceOptions& options) {
  return std::make_unique<CpuDevice>(options);
}

}  // namespace flownpu
