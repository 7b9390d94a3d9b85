// SPDX-License-Identifier: Apache-2.0
// flownpu_testing: lets Python prepare and run one node on a device, as the EP does, on numpy's
// memory.
#include "tests/ops/bindings.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/cpu/attention_plan.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/q4nx_matmul_plan.h"
#include "ops/device.h"
#include "ops/error.h"
#include "tests/npu/bindings.h"
#include "tests/ops/arguments.h"

namespace nb = nanobind;

namespace {

using flownpu::testing::Argument;
using flownpu::testing::tensor_of;
using flownpu::testing::tensors_of;
using flownpu::testing::type_of;

class PreparedNode {
 public:
  // `inputs`: as they will come, with the memory of those in `constants`; `outputs`: type names, ""
  // for an unused one; `version`: of the operator's schema, 0 for the last that is taken.
  PreparedNode(const std::string& domain, const std::string& op_type,
               const std::map<std::string, flownpu::Attribute>& attributes,
               const std::vector<Argument>& inputs, const std::vector<std::size_t>& constants,
               const std::vector<std::string>& outputs,
               const std::map<std::string, std::string>& options, int version) {
    flownpu::DeviceOptions device_options;
    if (options.contains("cpu_isa")) device_options.cpu_isa = options.at("cpu_isa");
    if (options.contains("threads")) device_options.threads = std::stoi(options.at("threads"));
    if (options.contains("activations")) {
      const bool int8 = options.at("activations") == "int8";
      device_options.activations =
          int8 ? flownpu::Activations::kInt8 : flownpu::Activations::kBFloat16;
    }
    device_ = flownpu::make_cpu_device(device_options);

    flownpu::Node node;
    node.name = "node";
    node.op_type = op_type;
    node.domain = domain;
    node.since_version = version;
    for (const flownpu::Contract& contract : device_->contracts()) {
      if (version == 0 && contract.op_type == op_type && contract.domain == domain)
        node.since_version = contract.last_version;
    }
    node.attributes.insert(attributes.begin(), attributes.end());
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      flownpu::Value value;
      if (inputs[i]) {
        const flownpu::Tensor tensor = tensor_of(inputs[i]);
        value.name = "input" + std::to_string(i);
        value.type = tensor.type;
        value.shape = tensor.shape;
        for (std::size_t constant : constants) {
          if (constant == i) value.constant = tensor.data;
        }
      }
      node.inputs.push_back(value);
    }
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      flownpu::Value value;
      if (!outputs[i].empty()) {
        value.name = "output" + std::to_string(i);
        value.type = type_of(outputs[i]);
      }
      node.outputs.push_back(value);
    }
    constants_ = inputs;
    outputs_ = outputs.size();
    step_ = device_->prepare(node);
  }

  std::vector<std::vector<std::int64_t>> infer(const std::vector<Argument>& inputs) const {
    std::vector<flownpu::Shape> shapes(outputs_);
    step_->infer(tensors_of(inputs), shapes);
    std::vector<std::vector<std::int64_t>> lists;
    for (const flownpu::Shape& shape : shapes) lists.emplace_back(shape.begin(), shape.end());
    return lists;
  }

  void run(const std::vector<Argument>& inputs, const std::vector<Argument>& outputs) {
    const std::vector<flownpu::Tensor> in = tensors_of(inputs);
    const std::vector<flownpu::Tensor> out = tensors_of(outputs);
    const std::size_t bytes = step_->scratch_bytes(in);
    // Exactly as much, so that a sanitizer sees what lies beyond; the same again, as in a model.
    if (!scratch_ || bytes != scratch_bytes_) {
      scratch_ = device_->allocate(bytes);
      scratch_bytes_ = bytes;
    }
    const nb::gil_scoped_release released;
    step_->run(in, out, {scratch_.get(), bytes});
  }

  std::int64_t multiply_adds() const { return step_->multiply_adds(); }

 private:
  std::unique_ptr<flownpu::Device> device_;
  std::unique_ptr<flownpu::Step> step_;
  // Keeps the constants' memory alive.
  std::vector<Argument> constants_;
  std::size_t outputs_ = 0;
  flownpu::Memory scratch_{nullptr, nullptr};
  std::size_t scratch_bytes_ = 0;
};

std::map<std::string, std::int64_t> attention_plan(
    const std::map<std::string, std::int64_t>& shape,
    const std::map<std::string, std::int64_t>& machine) {
  const flownpu::cpu::AttentionPlan plan = flownpu::cpu::plan_attention(
      {shape.at("batch"), shape.at("kv_heads"), shape.at("heads_per_group"), shape.at("head_size"),
       shape.at("tokens"), shape.at("total"), shape.at("window"), shape.at("cache_element")},
      {machine.at("threads"), machine.at("cache_bytes"), machine.at("few_rows"),
       machine.at("block_rows"), machine.at("element")});
  return {{"few", plan.few ? 1 : 0}, {"tile_tokens", plan.tile_tokens}, {"tiles", plan.tiles},
          {"parts", plan.parts},     {"chunk_keys", plan.chunk_keys},   {"tasks", plan.tasks}};
}

}  // namespace

NB_MODULE(flownpu_testing, module) {
  nb::set_leak_warnings(
      false);  // Tests' parameters are objects of ours, and live as long as Python does.
  module.def("available_isas", [] {
    std::vector<std::string> names;
    for (const auto* kernels : flownpu::cpu::available_kernels()) names.emplace_back(kernels->isa);
    return names;
  });
  module.def("attention_plan", attention_plan, nb::arg("shape"), nb::arg("machine"));
  module.def("matmul_plan", [](std::int64_t rows, std::int64_t row_blocks, std::int64_t threads) {
    const flownpu::cpu::MatMulPlan plan = flownpu::cpu::plan_matmul(rows, row_blocks, threads);
    return std::pair(plan.row_parts, plan.block_parts);
  });
  bind_thread_pool(module);
  bind_contracts(module);
  nb::class_<PreparedNode>(module, "PreparedNode")
      .def(nb::init<const std::string&, const std::string&,
                    const std::map<std::string, flownpu::Attribute>&, const std::vector<Argument>&,
                    const std::vector<std::size_t>&, const std::vector<std::string>&,
                    const std::map<std::string, std::string>&, int>(),
           nb::arg("domain"), nb::arg("op_type"), nb::arg("attributes"), nb::arg("inputs").none(),
           nb::arg("constants"), nb::arg("outputs"), nb::arg("options"), nb::arg("version"))
      .def("infer", &PreparedNode::infer)
      .def("run", &PreparedNode::run)
      .def("multiply_adds", &PreparedNode::multiply_adds);
  nb::module_ npu = module.def_submodule("npu");
  bind_npu_decoder(npu);
  // After it: of exceptions those that are bound last are tried first, and DeviceError is one of
  // DeviceFailed's.
  bind_npu_runtime(npu);
}
