// SPDX-License-Identifier: Apache-2.0
#include "ep/run/cpu_provider.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <utility>

#include "ep/model/graph.h"
#include "ops/error.h"

namespace flownpu {
namespace {

std::vector<const char*> c_strings(const std::vector<std::string>& texts) {
  std::vector<const char*> pointers;
  pointers.reserve(texts.size());
  for (const std::string& text : texts) pointers.push_back(text.c_str());
  return pointers;
}

}  // namespace

CpuProvider::CpuProvider(const Api& api, std::vector<Node> nodes, std::vector<std::string> inputs,
                         std::vector<std::string> outputs, OperatorSets opsets, int threads)
    : api_(api),
      nodes_(std::move(nodes)),
      inputs_(std::move(inputs)),
      outputs_(std::move(outputs)),
      opsets_(std::move(opsets)),
      threads_(threads) {
  // ORT passes constants in each run; only tensor attributes stay in the nodes.
  for (Node& node : nodes_) {
    for (Value& input :
         std::span(node.inputs).first(node.inputs.size() - node.tensor_attributes.size())) {
      if (input.constant != nullptr) constants_.insert(input.name);
      input.constant = nullptr;
      input.owner = nullptr;
    }
  }
}

CpuProvider::~CpuProvider() {
  if (session_ != nullptr) api_.call(ort::ReleaseSession, session_);
  if (environment_ != nullptr) api_.call(ort::ReleaseEnv, environment_);
}

bool CpuProvider::knows(const std::vector<Node>& nodes) {
  return std::ranges::all_of(nodes, [](const Node& node) {
    return node.domain != kDomain && node.op_type != "EPContext" && node.packed.empty();
  });
}

OrtSession* CpuProvider::session() const {
  const std::scoped_lock lock(mutex_);
  if (session_ != nullptr) return session_;
  // The process already has an ORT environment: this adds a reference to it.
  if (environment_ == nullptr)
    api_.call(ort::CreateEnv, ort::ORT_LOGGING_LEVEL_WARNING, "FlowNPU", &environment_);
  OrtSessionOptions* made = nullptr;
  api_.call(ort::CreateSessionOptions, &made);
  const auto release = [this](OrtSessionOptions* options) {
    api_.call(ort::ReleaseSessionOptions, options);
  };
  const std::unique_ptr<OrtSessionOptions, decltype(release)> options(made, release);
  api_.call(ort::SetIntraOpNumThreads, made, threads_);
  const std::string model = onnx_model(nodes_, inputs_, outputs_, constants_, opsets_);
  api_.call(ort::CreateSessionFromArray, environment_, model.data(), model.size(), made, &session_);
  return session_;
}

void CpuProvider::run(OrtKernelContext* context) const {
  std::vector<const OrtValue*> inputs(inputs_.size());
  for (std::size_t i = 0; i < inputs.size(); ++i)
    api_.call(ort::KernelContext_GetInput, context, i, &inputs[i]);
  std::vector<OrtValue*> results(outputs_.size());
  const std::vector<const char*> input_names = c_strings(inputs_);
  const std::vector<const char*> output_names = c_strings(outputs_);
  api_.call(ort::Run, session(), nullptr, input_names.data(), inputs.data(), inputs.size(),
            output_names.data(), output_names.size(), results.data());

  const auto release = [this](OrtValue* value) { api_.call(ort::ReleaseValue, value); };
  std::vector<std::unique_ptr<OrtValue, decltype(release)>> owned;
  owned.reserve(results.size());
  for (OrtValue* result : results) owned.emplace_back(result, release);
  for (std::size_t i = 0; i < results.size(); ++i) copy(results[i], context, i);
}

void CpuProvider::copy(OrtValue* result, OrtKernelContext* context, std::size_t index) const {
  ort::ONNXTensorElementDataType element = ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  const std::int64_t* dims = nullptr;
  std::size_t rank = 0;
  api_.call(ort::GetTensorElementTypeAndShapeDataReference, result, &element, &dims, &rank);
  const std::optional<DataType> type = data_type_of(element);
  if (!type) fail("[FlowNPU] output '", outputs_[index], "' has element type ", element);
  std::size_t bytes = size_of(*type);
  for (std::size_t axis = 0; axis < rank; ++axis) bytes *= static_cast<std::size_t>(dims[axis]);
  OrtValue* output = nullptr;
  api_.call(ort::KernelContext_GetOutput, context, index, dims, rank, &output);
  if (output == nullptr || bytes == 0) return;  // nobody asked for it
  void* from = nullptr;
  void* to = nullptr;
  api_.call(ort::GetTensorMutableData, result, &from);
  api_.call(ort::GetTensorMutableData, output, &to);
  std::memcpy(to, from, bytes);
}

}  // namespace flownpu
