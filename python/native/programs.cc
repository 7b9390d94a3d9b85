// SPDX-License-Identifier: Apache-2.0
// Runs programs in a folder of artifacts without a model: Python passes the constants that a
// session would pack, and may read any buffer. Everything else is as in a session
// (ops/npu/run/program.h).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/cpu/kernels.h"
#include "ops/cpu/thread_pool.h"
#include "ops/error.h"
#include "ops/npu/artifacts/compiled_designs.h"
#include "ops/npu/run/host_operators.h"
#include "ops/npu/run/program.h"
#include "python/native/bindings.h"

namespace nb = nanobind;

namespace flownpu::native {
namespace {

using GivenBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using GivenRows = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Given = std::map<std::string, GivenBytes>;

template <typename Element>
nb::ndarray<nb::numpy, Element, nb::ndim<1>> owned(std::vector<Element> values) {
  auto* kept = new std::vector<Element>(std::move(values));
  const nb::capsule owner(
      kept, [](void* data) noexcept { delete static_cast<std::vector<Element>*>(data); });
  return {kept->data(), {kept->size()}, owner};
}

std::unique_ptr<npu::Buffer> filled(npu::Runtime& runtime, const std::string& name,
                                    const GivenBytes& content, std::size_t bytes) {
  if (content.size() != bytes)
    fail("expected ", bytes, " bytes of the program's ", name, ", got ", content.size());
  std::unique_ptr<npu::Buffer> buffer = runtime.allocate(bytes);
  std::memcpy(buffer->bytes().data(), content.data(), bytes);
  buffer->to_device(0, bytes);
  return buffer;
}

// A program with its buffers and a KV cache of its own.
class ProgramRunner {
 public:
  // `given`: the initial contents of buffers by name, which must include all constants. Throws
  // Error if one is missing or has the wrong size.
  ProgramRunner(const std::string& folder, bool emulated, const std::string& kind,
                const Given& given)
      : designs_(npu::CompiledDesigns::open(folder, emulated)),
        record_(designs_->artifacts().require(kind, Node{}).front()),
        buffers_(designs_->runtime(), std::vector{record_}, Node{}, makers(given)),
        program_(designs_, *record_, buffers_,
                 {&cpu::select_kernels("auto"), cpu::ThreadPool::shared(0)}) {
    for (const npu::ProgramBuffer& buffer : record_->buffers) {
      if (buffer.role == npu::BufferRole::kCache) make_cache(buffer, given);
    }
  }

  [[nodiscard]] std::string description() const { return designs_->runtime().description(); }

  void write(const GivenRows& values) { program_.write({values.data(), values.size()}); }

  // Runs the program at a position of the context; returns the seconds until all its calls have
  // ended.
  double run(std::int64_t position) {
    const nb::gil_scoped_release released;
    designs_->begin_run();
    const auto begin = std::chrono::steady_clock::now();
    program_.run(position, "", cache_.get());
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  [[nodiscard]] nb::ndarray<nb::numpy, float, nb::ndim<1>> read() const {
    std::vector<float> values(record_->made.rows() * record_->made.columns);
    program_.read(values);
    return owned(std::move(values));
  }

  // The whole contents of a buffer.
  [[nodiscard]] nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>> buffer(
      const std::string& name) const {
    npu::Buffer* buffer = name == cache_name_ ? cache_.get() : buffers_.find(name);
    if (buffer == nullptr) fail("expected a buffer of the program ", record_->kind, ", got ", name);
    const std::span<std::byte> bytes = buffer->bytes();
    buffer->to_host(0, bytes.size());
    std::vector<std::uint8_t> content(bytes.size());
    std::memcpy(content.data(), bytes.data(), bytes.size());
    return owned(std::move(content));
  }

 private:
  npu::ProgramBuffers::Makers makers(const Given& given) {
    for (const npu::ProgramBuffer& buffer : record_->buffers) {
      if (buffer.role == npu::BufferRole::kConstant && !given.contains(buffer.name))
        fail("expected the program's constant ", buffer.name, ", and it is not given");
    }
    npu::ProgramBuffers::Makers makers;
    for (const auto& entry : given) {
      makers[entry.first] = [this, &entry](std::size_t bytes) {
        return filled(designs_->runtime(), entry.first, entry.second, bytes);
      };
    }
    return makers;
  }

  void make_cache(const npu::ProgramBuffer& buffer, const Given& given) {
    cache_name_ = buffer.name;
    const auto content = given.find(buffer.name);
    cache_ = content == given.end()
                 ? designs_->runtime().allocate(buffer.bytes)
                 : filled(designs_->runtime(), buffer.name, content->second, buffer.bytes);
  }

  std::shared_ptr<npu::CompiledDesigns> designs_;
  const npu::ProgramRecord* record_;
  npu::ProgramBuffers buffers_;
  npu::Program program_;
  std::string cache_name_;
  std::unique_ptr<npu::Buffer> cache_;
};

}  // namespace

void bind_programs(nb::module_& module) {
  nb::class_<ProgramRunner>(module, "ProgramRunner",
                            "A program of a folder of artifacts, with its buffers.")
      .def(nb::init<const std::string&, bool, const std::string&, const Given&>(),
           nb::arg("folder"), nb::arg("emulated"), nb::arg("kind"), nb::arg("given"))
      .def_prop_ro("description", &ProgramRunner::description)
      .def("write", &ProgramRunner::write, nb::arg("values"))
      .def("run", &ProgramRunner::run, nb::arg("position"))
      .def("read", &ProgramRunner::read)
      .def("buffer", &ProgramRunner::buffer, nb::arg("name"));
}

}  // namespace flownpu::native
