// SPDX-License-Identifier: Apache-2.0
// Prepares single operators and runs them on the memory of Python's arrays, without a graph.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ops/device.h"
#include "python/native/arrays.h"

namespace flownpu::native {

// One node on one device. Runs may overlap: each has its own working memory.
class PreparedNode {
 public:
  // `name`: the node's name in errors; `inputs`: examples of later runs' inputs, with types and
  // shapes, and with memory for positions in `constants`; `names`: the inputs' names in errors;
  // `outputs`: type names, "" for an unused output; `version`: the version of the operator's
  // schema, 0 for the last one that is supported. Throws Error.
  PreparedNode(std::shared_ptr<Device> device, const std::string& name, const std::string& domain,
               const std::string& op_type, const std::map<std::string, Attribute>& attributes,
               const std::vector<Input>& inputs, const std::vector<std::string>& names,
               const std::vector<std::size_t>& constants, const std::vector<std::string>& outputs,
               int version);

  std::vector<std::vector<std::int64_t>> infer(const std::vector<Input>& inputs) const;
  void run(const std::vector<Input>& inputs, const std::vector<Argument>& outputs);
  std::int64_t multiply_adds() const { return step_->multiply_adds(); }

 private:
  std::shared_ptr<Device> device_;
  std::unique_ptr<Step> step_;
  // Keeps the constants' memory alive.
  std::vector<Input> constants_;
  std::size_t outputs_ = 0;
  // The scratch memory of the last run, kept for the next one; guarded by the interpreter's lock.
  Memory scratch_{nullptr, nullptr};
  std::size_t scratch_bytes_ = 0;
};

// Makes the device `cpu` or `gpu`. `options`, which mean the same as the provider's: activations;
// for the CPU threads and cpu_isa; for the GPU opencl_device and gpu_weights. Throws Error for
// another device or option, for an invalid value, and if there is no GPU.
std::shared_ptr<Device> make_device(const std::string& name,
                                    const std::map<std::string, std::string>& options);

}  // namespace flownpu::native
