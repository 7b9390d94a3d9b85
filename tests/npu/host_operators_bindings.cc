// SPDX-License-Identifier: Apache-2.0
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/npu/run/host_operators.h"
#include "ops/npu/run/layer_experts.h"
#include "python/native/arrays.h"
#include "tests/npu/bindings.h"

namespace nb = nanobind;
using namespace flownpu::npu;  // NOLINT(google-build-using-namespace): the module is its face

namespace {

using Floats = nb::ndarray<nb::numpy, float, nb::c_contig>;
using ContiguousBytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>, nb::c_contig>;
// argument, "to_host" or "to_device", offset, bytes
using Transfer = std::tuple<std::size_t, std::string, std::size_t, std::size_t>;

// A caller's NumPy array as a buffer, which records its transfers.
class Watched final : public Buffer {
 public:
  Watched(const ContiguousBytes& array, std::size_t number, std::vector<Transfer>& transfers)
      : array_(array), number_(number), transfers_(&transfers) {}
  std::span<std::byte> bytes() override {
    return {reinterpret_cast<std::byte*>(array_.data()), array_.size()};
  }
  void to_device(std::size_t offset, std::size_t bytes) override {
    transfers_->emplace_back(number_, "to_device", offset, bytes);
  }
  void to_host(std::size_t offset, std::size_t bytes) override {
    transfers_->emplace_back(number_, "to_host", offset, bytes);
  }

 private:
  ContiguousBytes array_;
  std::size_t number_;
  std::vector<Transfer>* transfers_;
};

// An operator of the host, on NumPy arrays in place of a device's buffers.
class Operator {
 public:
  Operator(std::string op_type, const std::string& label,
           const std::map<std::string, std::vector<std::int64_t>>& parameters,
           const std::vector<std::pair<std::string, std::size_t>>& buffers, const std::string& isa,
           int threads)
      : compute_{&flownpu::cpu::select_kernels(isa), flownpu::cpu::ThreadPool::shared(threads)} {
    HostCallRecord record{std::move(op_type), {parameters.begin(), parameters.end()}, {}};
    for (const auto& [name, bytes] : buffers) record.buffers.push_back({name, bytes});
    operator_ = make_host_operator(record, label);
  }

  // `given`: each argument's NumPy array, and whether it is a constant, which the NPU never writes.
  std::vector<Transfer> run(const std::vector<std::pair<ContiguousBytes, bool>>& given,
                            std::int64_t position, std::size_t rows) {
    std::vector<Transfer> transfers;
    std::vector<std::unique_ptr<Watched>> buffers;
    std::vector<View> arguments;
    for (const auto& [array, constant] : given) {
      buffers.push_back(std::make_unique<Watched>(array, buffers.size(), transfers));
      arguments.push_back({buffers.back().get(), 0, array.size(), constant});
    }
    operator_->run(compute_, arguments, position, rows);
    return transfers;
  }

 private:
  HostCompute compute_;
  std::unique_ptr<HostOperator> operator_;
};

using flownpu::native::Argument;

// The experts of a decoder's layers, whose constants NumPy arrays hold.
class Experts {
 public:
  // `layers`: inputs of each one's Q4NXMoE behind X. `swiglu`: alpha, beta and limit. `packed`: all
  // experts as an array reads them, or nothing.
  Experts(const std::vector<std::vector<Argument>>& layers, std::int64_t hidden, std::int64_t size,
          std::int64_t experts, std::int64_t per_token, bool normalized,
          const std::array<float, 3>& swiglu, const std::optional<ContiguousBytes>& packed,
          const std::string& isa)
      : layers_(layers), packed_(packed) {
    const flownpu::transformer::FeedForward feed_forward{.size = size,
                                                         .experts = experts,
                                                         .experts_per_token = per_token,
                                                         .normalized_experts = normalized,
                                                         .swiglu_alpha = swiglu[0],
                                                         .swiglu_beta = swiglu[1],
                                                         .swiglu_limit = swiglu[2]};
    flownpu::Node node;
    DecoderShape shape;
    shape.hidden = hidden;
    for (const auto& constants : layers_) {
      shape.layers.push_back({flownpu::transformer::Attention{}, feed_forward});
      for (const Argument& constant : constants) {
        constants_.push_back(flownpu::native::tensor_of(constant));
        const flownpu::Tensor& tensor = constants_.back();
        node.inputs.push_back({.name = tensor.present() ? "constant" : "",
                               .type = tensor.type,
                               .shape = tensor.shape,
                               .constant = tensor.data});
      }
    }
    const flownpu::cpu::Context context{flownpu::cpu::select_kernels(isa),
                                        flownpu::cpu::ThreadPool::shared(2),
                                        flownpu::Activations::kBFloat16};
    std::span<const std::byte> bytes;
    if (packed_) bytes = {reinterpret_cast<const std::byte*>(packed_->data()), packed_->size()};
    experts_ = std::make_unique<LayerExperts>(node, shape, context, bytes);
    experts_->use(constants_);
  }

  void answer(std::size_t layer, const Floats& x, const Floats& answers) const {
    experts_->answer(layer, {x.data(), x.size()}, {answers.data(), answers.size()});
  }
  std::pair<std::vector<std::int32_t>, std::vector<float>> route(std::size_t layer, const Floats& x,
                                                                 std::size_t count) const {
    std::pair<std::vector<std::int32_t>, std::vector<float>> made{count, count};
    experts_->route(layer, {x.data(), x.size()}, made.first, made.second);
    return made;
  }

 private:
  std::vector<std::vector<Argument>> layers_;
  std::optional<ContiguousBytes> packed_;
  std::vector<flownpu::Tensor> constants_;
  std::unique_ptr<LayerExperts> experts_;
};

}  // namespace

void bind_host_operators(nb::module_& module) {
  nb::class_<Operator>(module, "HostOperator")
      .def(nb::init<std::string, const std::string&,
                    const std::map<std::string, std::vector<std::int64_t>>&,
                    const std::vector<std::pair<std::string, std::size_t>>&, const std::string&,
                    int>(),
           nb::arg("op_type"), nb::arg("label"), nb::arg("parameters"), nb::arg("buffers"),
           nb::arg("isa") = "auto", nb::arg("threads") = 2)
      .def("run", &Operator::run, nb::arg("arguments"), nb::arg("position") = 0,
           nb::arg("rows") = std::numeric_limits<std::size_t>::max());
  nb::class_<Experts>(module, "LayerExperts")
      .def(nb::init<const std::vector<std::vector<Argument>>&, std::int64_t, std::int64_t,
                    std::int64_t, std::int64_t, bool, const std::array<float, 3>&,
                    const std::optional<ContiguousBytes>&, const std::string&>(),
           nb::arg("layers"), nb::arg("hidden"), nb::arg("size"), nb::arg("experts"),
           nb::arg("per_token"), nb::arg("normalized"), nb::arg("swiglu"),
           nb::arg("packed") = nb::none(), nb::arg("isa") = "auto")
      .def("answer", &Experts::answer)
      .def("route", &Experts::route);
}
