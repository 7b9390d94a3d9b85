// SPDX-License-Identifier: Apache-2.0
#include "ep/run/compute.h"

#include <utility>

#include "ep/model/graph.h"
#include "ep/run/profiling.h"
#include "ops/lent_threads.h"

namespace flownpu {
namespace {

class KernelContextIo final : public PlanIo {
 public:
  KernelContextIo(const Api& api, OrtKernelContext* context) : api_(api), context_(context) {}

  Tensor input(std::size_t index) override {
    const OrtValue* value = nullptr;
    api_.call(ort::KernelContext_GetInput, context_, index, &value);
    if (value == nullptr) return {};
    ort::ONNXTensorElementDataType element = ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
    const std::int64_t* dims = nullptr;
    std::size_t rank = 0;
    api_.call(ort::GetTensorElementTypeAndShapeDataReference, value, &element, &dims, &rank);
    const std::optional<DataType> type = data_type_of(element);
    if (!type) fail("[FlowNPU] input ", index, " of the partition has element type ", element);
    Tensor tensor{.data = nullptr, .type = *type, .shape = Shape(dims, rank)};
    // Not const: an output may be bound to the same memory (a KV cache).
    api_.call(ort::GetTensorMutableData, const_cast<OrtValue*>(value), &tensor.data);
    return tensor;
  }

  void* output(std::size_t index, const Shape& shape) override {
    OrtValue* value = nullptr;
    api_.call(ort::KernelContext_GetOutput, context_, index, shape.begin(),
              static_cast<std::size_t>(shape.rank()), &value);
    void* data = nullptr;
    if (value != nullptr) api_.call(ort::GetTensorMutableData, value, &data);
    return data;
  }

 private:
  const Api& api_;
  OrtKernelContext* context_;
};

// ORT's threads, which the session's other nodes run on.
class SessionThreads final : public LentThreads {
 public:
  SessionThreads(const Api& api, OrtKernelContext* context) : api_(api), context_(context) {}

  void run(std::size_t count, void (*work)(void* context, std::size_t index),
           void* context) override {
    constexpr std::size_t kUnbatched = 0;
    api_.call(ort::KernelContext_ParallelFor, context_, work, count, kUnbatched, context);
  }

 private:
  const Api& api_;
  OrtKernelContext* context_;
};

}  // namespace

// A run changes only the plan's workspaces, so ORT's per-node state is not used.
ComputeInfo::ComputeInfo(const Api& api, std::unique_ptr<PlanWithFallback> plan,
                         std::unique_ptr<CpuProvider> elsewhere, Termination& termination,
                         bool shares_threads)
    : api_(api),
      plan_(std::move(plan)),
      elsewhere_(std::move(elsewhere)),
      termination_(termination),
      shares_threads_(shares_threads) {
  ort_version_supported = api.version();
  CreateState = [](OrtNodeComputeInfo* /*self*/, OrtNodeComputeContext* /*context*/,
                   void** state) -> OrtStatus* {
    *state = nullptr;
    return nullptr;
  };
  // The error code must not be ORT_EP_FAIL, for which onnxruntime's Python session silently starts
  // again on the CPU provider.
  Compute = [](OrtNodeComputeInfo* self, void* /*state*/, OrtKernelContext* context) {
    const auto& info = *static_cast<const ComputeInfo*>(self);
    return guard(info.api_, ort::ORT_RUNTIME_EXCEPTION, [&] { info.run(context); });
  };
  ReleaseState = [](OrtNodeComputeInfo* /*self*/, void* /*state*/) {};
}

void ComputeInfo::run(OrtKernelContext* context) const {
  // Options of a profiled run may ask for a profile of each run that uses them.
  StepObserver* observer = current_observer();
  const auto elsewhere = [&] {
    elsewhere_->run(context, observer == nullptr ? termination_.options() : nullptr);
  };
  if (plan_ == nullptr) return elsewhere();
  try {
    KernelContextIo io(api_, context);
    SessionThreads threads(api_, context);
    const Lend lend(shares_threads_ ? &threads : nullptr);
    const Cancellable cancellable(observer == nullptr ? &termination_ : nullptr);
    plan_->run(io, observer);
  } catch (const Unsupported&) {
    if (elsewhere_ == nullptr) throw;
    elsewhere();
  }
}

}  // namespace flownpu
