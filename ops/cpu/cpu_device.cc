// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <new>
#include <string>
#include <utility>

#include "ops/cpu/cpu_step.h"
#include "ops/error.h"

namespace flownpu {
namespace {

constexpr std::align_val_t kAlignment{64};

class CpuDevice final : public Device {
 public:
  explicit CpuDevice(const DeviceOptions& options)
      : context_{cpu::select_kernels(options.cpu_isa), cpu::ThreadPool::shared(options.threads),
                 options.activations} {}

  std::string_view name() const override { return "cpu"; }

  std::string description() const override {
    const char* rounding = context_.activations == Activations::kInt8 ? "int8" : "bf16";
    return "cpu (" + std::string(context_.kernels.isa) + ", " +
           std::to_string(context_.pool->threads()) + " threads, " + rounding + " activations)";
  }

  std::string unsupported(const Node& node) const override {
    try {
      prepare(node);
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  }

  std::unique_ptr<Step> prepare(const Node& node) const override {
    for (const auto operators :
         {cpu::q4nx_operators(), cpu::attention_operators(), cpu::normalization_operators(),
          cpu::elementwise_operators(), cpu::shape_operators()}) {
      for (const cpu::Operator& op : operators) {
        if (op.op_type == node.op_type && op.domain == node.domain) return op.make(node, context_);
      }
    }
    fail("the cpu device has no ", node.domain.empty() ? "ai.onnx" : node.domain,
         "::", node.op_type);
  }

  Memory allocate(std::size_t bytes) const override {
    return {static_cast<std::byte*>(::operator new(bytes, kAlignment)), release};
  }

  void wait() const override {}

 private:
  static void release(std::byte* memory) { ::operator delete(memory, kAlignment); }

  cpu::Context context_;
};

}  // namespace

std::unique_ptr<Device> make_cpu_device(const DeviceOptions& options) {
  return std::make_unique<CpuDevice>(options);
}

}  // namespace flownpu
