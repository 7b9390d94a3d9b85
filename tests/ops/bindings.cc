// SPDX-License-Identifier: Apache-2.0
// flownpu_testing: lets Python test parts that no user sees: plans, the pool of threads, the NPU's
// path.
#include "tests/ops/bindings.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "ops/cpu/attention/plan.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/products/q4nx_matmul_plan.h"
#include "ops/lowering/weights/quantize_group.h"
#include "tests/npu/bindings.h"

namespace nb = nanobind;

namespace {

std::map<std::string, std::int64_t> attention_plan(
    const std::map<std::string, std::int64_t>& shape,
    const std::map<std::string, std::int64_t>& machine) {
  const flownpu::cpu::AttentionPlan plan = flownpu::cpu::plan_attention(
      {shape.at("batch"), shape.at("kv_heads"), shape.at("heads_per_group"), shape.at("head_size"),
       shape.at("tokens"), shape.at("total"), shape.at("window"), shape.at("row_bytes")},
      {machine.at("threads"), machine.at("cache_bytes"), machine.at("few_rows"),
       machine.at("block_rows"), machine.at("element")});
  return {{"few", plan.few ? 1 : 0}, {"tile_tokens", plan.tile_tokens}, {"tiles", plan.tiles},
          {"parts", plan.parts},     {"chunk_keys", plan.chunk_keys},   {"tasks", plan.tasks}};
}

std::int64_t attention_scratch(const std::string& isa, const std::string& cache, std::int64_t rows,
                               std::int64_t head_size, std::int64_t chunk_keys) {
  using flownpu::DataType;
  static const std::map<std::string, DataType> kTypes{{"float", DataType::kFloat32},
                                                      {"float16", DataType::kFloat16},
                                                      {"bfloat16", DataType::kBFloat16},
                                                      {"int8", DataType::kInt8}};
  for (const auto* kernels : flownpu::cpu::available_kernels()) {
    if (kernels->isa == isa)
      return kernels->attention_scratch(rows, head_size, kTypes.at(cache), chunk_keys);
  }
  throw nb::value_error("not an instruction set of this machine");
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
  module.def("attention_scratch", attention_scratch, nb::arg("isa"), nb::arg("cache"),
             nb::arg("rows"), nb::arg("head_size"), nb::arg("chunk_keys"));
  module.def("matmul_plan", [](std::int64_t rows, std::int64_t row_blocks, std::int64_t threads) {
    const flownpu::cpu::MatMulPlan plan = flownpu::cpu::plan_matmul(rows, row_blocks, threads);
    return std::pair(plan.row_parts, plan.block_parts);
  });
  module.def("search_widths", flownpu::lowering::search_widths);
  module.def(
      "quantize_groups",
      [](const nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>& groups,
         std::size_t width) {
        std::vector<flownpu::lowering::Q4NXGroup> found(groups.shape(0));
        flownpu::lowering::quantize_groups({groups.data(), groups.size()}, groups.shape(1), found,
                                           width);
        return nb::bytes(found.data(), found.size() * sizeof(found.front()));
      },
      nb::arg("groups"), nb::arg("width"));
  bind_thread_pool(module);
  bind_tile_rows(module);
  bind_pages(module);
  nb::module_ gpu = module.def_submodule("gpu");
  bind_gpu(gpu);
  nb::module_ npu = module.def_submodule("npu");
  bind_npu_decoder(npu);
  bind_gpu_session(gpu);
  // After the decoder: exceptions that are bound last are tried first, and a DeviceError is a
  // DeviceFailed.
  bind_npu_runtime(npu);
  bind_waiting(npu);
  bind_host_operators(npu);
}
