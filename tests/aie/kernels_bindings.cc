// SPDX-License-Identifier: Apache-2.0
// flownpu_aie_testing: lets Python call kernels on numpy arrays. The kernels come from a library
// that exports the table of aie/host/kernel_table.h.
#include <dlfcn.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "aie/host/kernel_table.h"

namespace nb = nanobind;
namespace host = flownpu::aie_host;

namespace {

using Array = nb::ndarray<nb::c_contig, nb::device::cpu>;
using Constant = nb::ndarray<nb::c_contig, nb::device::cpu, nb::ro>;
using Given = std::variant<std::int32_t, Array, Constant>;

host::Argument buffer(const auto& array) {
  return {const_cast<void*>(static_cast<const void*>(array.data())), array.nbytes(), 0};
}

class Kernels {
 public:
  explicit Kernels(const std::string& path) {
    // RTLD_LOCAL: the other architecture's library has functions of the same names.
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(dlerror());
    const auto get = reinterpret_cast<host::GetKernelTable>(dlsym(library, host::kGetKernelTable));
    if (get == nullptr) throw std::runtime_error(path + " exports no " + host::kGetKernelTable);
    table_ = get();
  }

  std::string architecture() const { return table_->architecture; }

  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (std::size_t i = 0; i < table_->kernel_count; ++i)
      names.emplace_back(table_->kernels[i].name);
    return names;
  }

  // (type, is a buffer, is written) of each parameter.
  std::vector<std::tuple<std::string, bool, bool>> parameters(const std::string& name) const {
    const host::Kernel& kernel = find(name);
    std::vector<std::tuple<std::string, bool, bool>> parameters;
    for (std::size_t i = 0; i < kernel.parameter_count; ++i) {
      const host::Parameter& parameter = kernel.parameters[i];
      parameters.emplace_back(parameter.type, parameter.is_buffer, parameter.is_written);
    }
    return parameters;
  }

  void call(const std::string& name, const std::vector<Given>& given) const {
    const host::Kernel& kernel = find(name);
    if (given.size() != kernel.parameter_count) {
      throw nb::type_error((name + ": expected " + std::to_string(kernel.parameter_count) +
                            " arguments, got " + std::to_string(given.size()))
                               .c_str());
    }
    std::vector<host::Argument> arguments;
    for (std::size_t i = 0; i < given.size(); ++i) {
      const host::Parameter& parameter = kernel.parameters[i];
      const bool is_buffer = given[i].index() != 0;
      if (is_buffer != parameter.is_buffer || (parameter.is_written && given[i].index() != 1)) {
        throw nb::type_error((name + ": argument " + std::to_string(i) + " is " +
                              (parameter.is_written  ? "a written buffer"
                               : parameter.is_buffer ? "a buffer"
                                                     : "an integer"))
                                 .c_str());
      }
      if (given[i].index() == 0) arguments.push_back({nullptr, 0, std::get<0>(given[i])});
      if (given[i].index() == 1) arguments.push_back(buffer(std::get<1>(given[i])));
      if (given[i].index() == 2) arguments.push_back(buffer(std::get<2>(given[i])));
    }
    char error[512] = "";
    if (!kernel.call(arguments.data(), error, sizeof(error)))
      throw std::runtime_error(name + ": " + error);
  }

 private:
  const host::Kernel& find(const std::string& name) const {
    for (std::size_t i = 0; i < table_->kernel_count; ++i) {
      if (name == table_->kernels[i].name) return table_->kernels[i];
    }
    throw nb::key_error(name.c_str());
  }

  const host::KernelTable* table_;
};

}  // namespace

NB_MODULE(flownpu_aie_testing, module) {
  nb::class_<Kernels>(std::move(module), "Kernels")
      .def(nb::init<const std::string&>(), nb::arg("path"))
      .def_prop_ro("architecture", &Kernels::architecture)
      .def("names", &Kernels::names)
      .def("parameters", &Kernels::parameters, nb::arg("name"))
      .def("call", &Kernels::call, nb::arg("name"), nb::arg("arguments"));
}
