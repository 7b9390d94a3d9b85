// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/context/context.h"

#include "ops/gpu/context/time_limit.h"
#include "ops/gpu/context/twins.h"
#include "ops/gpu/language/generate.h"

namespace flownpu::gpu {

Context::Context(DeviceFacts facts, std::filesystem::path cache_folder)
    : facts_(std::move(facts)),
      cache_(std::move(cache_folder)),
      limit_(time_limit(facts_)),
      twins_(std::make_unique<Twins>()) {}

Context::~Context() = default;

std::shared_ptr<const CompiledKernel> Context::compile(const KernelDescription& kernel,
                                                       Element activation) {
  std::vector<bool> writes;
  for (const TensorDescription& tensor : kernel.arguments())
    writes.push_back(tensor.access == Access::kWrite);
  const std::string source = generate(kernel, dialect(), activation);
  std::shared_ptr<const CompiledKernel>& known = kernels_[kernel.name + "\n" + source];
  if (known == nullptr) {
    const std::string key = identity() + std::to_string(source.size()) + ":" + source + "\n";
    known = compile_source(kernel, source, key, std::move(writes));
  }
  return known;
}

void Context::check_not_given_up() const {
  if (!given_up_) return;
  throw GpuError(Failure::kTime, "[FlowNPU] device 'gpu': " + facts().title() +
                                     " was given up, since a kernel did not end: begin anew, "
                                     "with device = cpu if it comes again");
}

void Context::give_up(const std::string& commands) {
  given_up_ = true;
  failed_ = true;
  throw GpuError(
      Failure::kTime,
      "[FlowNPU] device 'gpu': " + commands + " did not end within " +
          std::to_string(static_cast<double>(limit_.count()) / 1e3) + " s on " + facts().title() +
          ": the device hangs, or is very slow; see `sudo dmesg`, update the driver, or set " +
          kTimeVariable + " to more seconds");
}

// The device's limit. The driver decides whether registers allow a kernel so many. Its report is
// not used: Mesa 22.3 reports 32 for every kernel, and runs more.
void Context::check_lanes(const CompiledKernel& kernel, const Grid& grid) const {
  if (grid.lanes <= facts().work_group) return;
  throw GpuError(Failure::kCommand, "[FlowNPU] device 'gpu': kernel " + kernel.name() +
                                        ": expected work-groups of at most " +
                                        std::to_string(facts().work_group) + " items on " +
                                        facts().title() + ", got " + std::to_string(grid.lanes) +
                                        "; use device = cpu");
}

std::string Context::describe_allocation(std::size_t bytes) const {
  return "a buffer of " + std::to_string(bytes) + " bytes (the largest has " +
         std::to_string(facts().allocation) + "; of " + std::to_string(facts().memory) + " bytes " +
         std::to_string(live_bytes()) + " are in use)";
}

}  // namespace flownpu::gpu
