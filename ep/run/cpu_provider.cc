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

bool CpuProvider::knows(const std::vector<Node>& nodes) {
  return std::ranges::all_of(nodes, [](const Node& node) {
    return node.domain != kDomain && node.op_type != "EPContext" && node.packed.empty();
  });
}

const OwnSession& CpuProvider::session() const {
  const std::scoped_lock lock(mutex_);
  if (session_ == nullptr) {
    session_ = std::make_unique<OwnSession>(
        api_, onnx_model(nodes_, inputs_, outputs_, constants_, opsets_), threads_,
        ort::ORT_LOGGING_LEVEL_WARNING);
  }
  return *session_;
}

void CpuProvider::run(OrtKernelContext* context, const OrtRunOptions* options) const {
  std::vector<const OrtValue*> inputs(inputs_.size());
  for (std::size_t i = 0; i < inputs.size(); ++i)
    api_.call(ort::KernelContext_GetInput, context, i, &inputs[i]);
  std::vector<OrtValue*> results(outputs_.size());
  session().run(options, c_strings(inputs_), inputs, c_strings(outputs_), results);

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
  // The rank may be above what a Shape takes.
  std::int64_t elements = 1;
  for (std::size_t axis = 0; axis < rank; ++axis) elements *= dims[axis];
  const std::size_t bytes = bytes_of(*type, Shape{elements});
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
