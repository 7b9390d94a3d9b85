// SPDX-License-Identifier: Apache-2.0
// A context of OpenCL: one device with one queue.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ops/gpu/context/context.h"
#include "ops/gpu/opencl/devices.h"
#include "ops/gpu/opencl/progress.h"

namespace flownpu::gpu {

class OpenClContext final : public Context {
 public:
  explicit OpenClContext(FoundDevice device,
                         std::filesystem::path cache_folder = default_cache_folder());
  ~OpenClContext() override;

  const char* api() const override { return "OpenCL"; }
  const Dialect& dialect() const override { return opencl_c(); }
  std::string identity() const override;
  Buffer allocate(std::size_t bytes) override;
  Buffer use(std::span<const std::byte> memory, std::shared_ptr<const void> owner) override;
  Buffer image_of(const Buffer& buffer) override;
  void write(const Buffer& buffer, std::span<const std::byte> from, std::size_t offset) override;
  void read(const Buffer& buffer, std::span<std::byte> to, std::size_t offset) override;
  void copy(const Buffer& from, std::size_t from_offset, const Buffer& to, std::size_t to_offset,
            std::size_t bytes) override;
  void launch(const CompiledKernel& kernel, std::span<const KernelArgument> arguments,
              const Grid& grid) override;
  void wait() override;
  std::vector<KernelTime> take_times() override;

 private:
  std::shared_ptr<const CompiledKernel> compile_source(const KernelDescription& description,
                                                       const std::string& source,
                                                       const std::string& key,
                                                       std::vector<bool> writes) override;
  void check_own() const override;

  // The commands between two marks (progress.h).
  struct CommandRange {
    std::string_view first;
    std::string_view last;
    std::int64_t commands = 0;
  };
  struct Mark {
    cl::Event event;
    CommandRange before;
  };

  // Throws as status.h's check does, and remembers that the device failed.
  void check(cl::Int code, std::string_view call, const std::string& what,
             const std::string& details = "");
  void enqueued(std::string_view kernel);
  void mark();
  cl::Program load(const std::string& key);
  cl::Program build(const std::string& name, const std::string& source);
  void keep(cl::Program program, const std::string& key);
  std::string build_log(cl::Program program) const;
  void collect();
  static std::string text_of(const CommandRange& range);

  class Kernel;
  struct Launched {
    std::string kernel;
    cl::Event event;
    std::int64_t enqueued_ns;  // by the host's clock, when the call had returned
  };

  cl::Platform platform_ = nullptr;
  cl::DeviceId id_ = nullptr;
  cl::Context context_ = nullptr;
  cl::Queue queue_ = nullptr;
  std::vector<Launched> launched_;
  std::vector<KernelTime> times_;
  CommandRange since_mark_;
  std::vector<Mark> marks_;  // not waited for yet
  std::vector<std::shared_ptr<const void>> owners_;
};

}  // namespace flownpu::gpu
