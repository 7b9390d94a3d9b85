// SPDX-License-Identifier: Apache-2.0
#include "python/native/operators.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "ops/choices.h"
#include "ops/error.h"
#include "ops/gpu/device.h"
#include "python/native/bindings.h"

namespace nb = nanobind;

namespace flownpu::native {
namespace {

// The same limit as the execution provider's (ep/options.cc).
constexpr int kMostThreads = 1024;

int threads_of(const std::string& text) {
  int threads = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), threads);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  if (!whole || threads < 0 || threads > kMostThreads)
    fail("expected threads = 0 to ", kMostThreads, ", got '", text, "'");
  return threads;
}

int last_version(const Device& device, const std::string& domain, const std::string& op_type) {
  for (const Contract& contract : device.contracts()) {
    if (contract.op_type == op_type && contract.domain == domain) return contract.last_version;
  }
  return 0;
}

// Converts DLPack's element type; throws Error if no DataType corresponds to it.
DataType type_of(nb::dlpack::dtype type) {
  using Code = nb::dlpack::dtype_code;
  const auto is = [&](Code code, int bits) {
    return type.code == static_cast<std::uint8_t>(code) && type.bits == bits && type.lanes == 1;
  };
  if (is(Code::Float, 32)) return DataType::kFloat32;
  if (is(Code::Float, 16)) return DataType::kFloat16;
  if (is(Code::Bfloat, 16)) return DataType::kBFloat16;
  if (is(Code::Int, 64)) return DataType::kInt64;
  if (is(Code::Int, 32)) return DataType::kInt32;
  if (is(Code::Int, 8)) return DataType::kInt8;
  if (is(Code::UInt, 8)) return DataType::kUInt8;
  if (is(Code::Bool, 8)) return DataType::kBool;
  fail("no operator takes its type");
}

// For an array of another library that exports DLPack: the name of its element type, and a NumPy
// view of its memory as unsigned integers of the elements' size. Throws Error if there is none in
// the CPU's memory.
std::pair<std::string, nb::object> borrow(nb::handle value) {
  nb::ndarray<nb::ro, nb::device::cpu> array;
  if (!nb::try_cast(value, array, false)) fail("DLPack gives no memory of the CPU for it");
  const DataType type = type_of(array.dtype());
  std::vector<std::size_t> shape;
  std::vector<std::int64_t> strides;
  for (std::size_t axis = 0; axis < array.ndim(); ++axis) {
    shape.push_back(array.shape(axis));
    strides.push_back(array.stride(axis));
  }
  const auto bits = static_cast<std::uint8_t>(8 * size_of(type));
  const nb::dlpack::dtype integers{static_cast<std::uint8_t>(nb::dlpack::dtype_code::UInt), bits,
                                   1};
  using Kept = nb::ndarray<nb::ro, nb::device::cpu>;
  auto* kept = std::make_unique<Kept>(array).release();
  const nb::capsule owner(kept, [](void* data) noexcept { delete static_cast<Kept*>(data); });
  const nb::ndarray<nb::numpy, nb::ro> integers_of(array.data(), array.ndim(), shape.data(), owner,
                                                   strides.data(), integers);
  return {std::string(name_of(type)), nb::cast(integers_of)};
}

}  // namespace

PreparedNode::PreparedNode(std::shared_ptr<Device> device, const std::string& name,
                           const std::string& domain, const std::string& op_type,
                           const std::map<std::string, Attribute>& attributes,
                           const std::vector<Input>& inputs, const std::vector<std::string>& names,
                           const std::vector<std::size_t>& constants,
                           const std::vector<std::string>& outputs, int version)
    : device_(std::move(device)), constants_(inputs), outputs_(outputs.size()) {
  Node node;
  node.name = name;
  node.op_type = op_type;
  node.domain = domain;
  node.since_version = version == 0 ? last_version(*device_, domain, op_type) : version;
  node.attributes.insert(attributes.begin(), attributes.end());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Value& value = node.inputs.emplace_back();
    if (!inputs[i]) continue;
    const Tensor tensor = tensor_of(inputs[i]);
    value.name = i < names.size() ? names[i] : "input" + std::to_string(i);
    value.type = tensor.type;
    value.shape = tensor.shape;
    if (std::ranges::find(constants, i) != constants.end()) value.constant = tensor.data;
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    Value& value = node.outputs.emplace_back();
    if (outputs[i].empty()) continue;
    value.name = "output" + std::to_string(i);
    value.type = native::type_of(outputs[i]);
  }
  step_ = device_->prepare(node);
}

std::vector<std::vector<std::int64_t>> PreparedNode::infer(const std::vector<Input>& inputs) const {
  std::vector<Shape> shapes(outputs_);
  step_->infer(tensors_of(inputs), shapes);
  std::vector<std::vector<std::int64_t>> lists;
  lists.reserve(shapes.size());
  for (const Shape& shape : shapes) lists.emplace_back(shape.begin(), shape.end());
  return lists;
}

void PreparedNode::run(const std::vector<Input>& inputs, const std::vector<Argument>& outputs) {
  const std::vector<Tensor> in = tensors_of(inputs);
  const std::vector<Tensor> out = tensors_of(outputs);
  const std::size_t bytes = step_->scratch_bytes(in);
  // Exactly as much as needed, so that a sanitizer detects accesses beyond it. Memory of the same
  // size is reused, because a model's sizes repeat.
  Memory scratch = std::exchange(scratch_, Memory{nullptr, nullptr});
  if (!scratch || bytes != scratch_bytes_) scratch = device_->allocate(bytes);
  {
    const nb::gil_scoped_release released;
    step_->run(in, out, {scratch.get(), bytes});
  }
  scratch_ = std::move(scratch);
  scratch_bytes_ = bytes;
}

std::shared_ptr<Device> make_device(const std::string& name,
                                    const std::map<std::string, std::string>& options) {
  const bool is_gpu = name == "gpu";
  if (name != "cpu" && !is_gpu) {
    fail("expected the device 'cpu' or 'gpu', got '", name,
         "': on the others whole decoders and encoders run, through ONNX Runtime");
  }
  DeviceOptions chosen;
  for (const auto& [key, value] : options) {
    if (key == "activations") {
      chosen.activations = choose(key, value, kActivationsChoices);
    } else if (key == "threads" && !is_gpu) {
      chosen.threads = threads_of(value);
    } else if (key == "cpu_isa" && !is_gpu) {
      chosen.cpu_isa = value;
    } else if (key == "opencl_device" && is_gpu) {
      chosen.opencl_device = value;
    } else if (key == "gpu_api" && is_gpu) {
      chosen.gpu_api = choose(key, value, kGpuApiChoices);
    } else if (key == "gpu_weights" && is_gpu) {
      chosen.gpu_weights = choose(key, value, kGpuWeightsChoices);
    } else if (key == "gpu_matrices" && is_gpu) {
      chosen.gpu_matrices = choose(key, value, kGpuMatricesChoices);
    } else if (key == "gpu_winograd" && is_gpu) {
      chosen.gpu_winograd = choose(key, value, kGpuWinogradChoices);
    } else {
      fail("expected the options ",
           is_gpu
               ? "activations, opencl_device, gpu_api, gpu_weights, gpu_matrices and gpu_winograd"
               : "activations, threads and cpu_isa",
           ", got '", key, "'");
    }
  }
  return is_gpu ? make_gpu_operators(chosen) : make_cpu_device(chosen);
}

void bind_operators(nb::module_& module) {
  nb::class_<Device>(module, "Device", "What computes nodes.")
      .def_prop_ro("description",
                   [](const Device& device) { return std::string(device.description()); });
  module.def("make_device", make_device, nb::arg("name"), nb::arg("options"));
  module.def("borrow", borrow, nb::arg("value"),
             "The element type of another library's array, and a view of its memory as unsigned "
             "integers of the elements' size. Raises ValueError if `value` is no such array.");
  nb::class_<PreparedNode>(
      module, "PreparedNode",
      "One node on a device. An array is a pair of its type's name and its memory, or None.")
      .def(nb::init<std::shared_ptr<Device>, const std::string&, const std::string&,
                    const std::string&, const std::map<std::string, Attribute>&,
                    const std::vector<Input>&, const std::vector<std::string>&,
                    const std::vector<std::size_t>&, const std::vector<std::string>&, int>(),
           nb::arg("device"), nb::arg("name"), nb::arg("domain"), nb::arg("op_type"),
           nb::arg("attributes"), nb::arg("inputs"), nb::arg("names"), nb::arg("constants"),
           nb::arg("outputs"), nb::arg("version"))
      .def("infer", &PreparedNode::infer, nb::arg("inputs"), "The shapes of the outputs.")
      .def("run", &PreparedNode::run, nb::arg("inputs"), nb::arg("outputs"),
           "Computes; other Python threads run meanwhile.")
      .def("multiply_adds", &PreparedNode::multiply_adds);
}

}  // namespace flownpu::native
