// SPDX-License-Identifier: Apache-2.0
// Single operators, prepared and run on the memory of Python's arrays, without a graph around them.
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

// One node on one device. Runs may overlap: each has a working memory of its own.
class PreparedNode {
 public:
  // `name`: what errors call the node; `inputs`: as they will come, with the memory of those in
  // `constants`; `names`: what errors call those; `outputs`: type names, "" for an unused one;
  // `version`: of the operator's schema, 0 for the last that is taken.
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
  // Scratch memory of the last run, kept for the next; guarded by the interpreter's lock.
  Memory scratch_{nullptr, nullptr};
  std::size_t scratch_bytes_ = 0;
};

// `cpu` or `gpu`. `options`: activations, of the CPU threads and cpu_isa, as the provider's, and of
// the GPU opencl_device and gpu_weights. Throws Error for another device or option, for values
// that are none, and where there is no GPU.
std::shared_ptr<Device> make_device(const std::string& name,
                                    const std::map<std::string, std::string>& options);

}  // namespace flownpu::native
