// SPDX-License-Identifier: Apache-2.0
// A Q4NX weight on the device, and the kernels that multiply rows by it (products.cc).
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "ops/device.h"
#include "ops/gpu/kernels/kernels.h"
#include "ops/gpu/operators/run.h"

namespace flownpu::gpu {

class WeightProduct {
 public:
  // Copies the weight to the device; teams and storage of `shape`, and matrix units, are chosen
  // here. Throws Error for a weight that is too large for the device, or for `weights`, and for
  // `matrices` that are wanted and not right.
  WeightProduct(Context& context, const Value& weight, const ProductShape& shape,
                Activations activations, GpuWeights weights, GpuMatrices matrices);

  const ProductShape& shape() const { return shape_; }

  // Enqueues y f32 [tokens][M] = x f32 [tokens][K] . W^T. `addends`: bias, then residual, of those
  // that the shape has.
  void enqueue(Run& run, std::int64_t tokens, const Buffer* x, const Buffer* y,
               std::span<const Buffer* const> addends = {}) const;

 private:
  ProductShape shape_;
  bool rounds_;
  std::optional<MatrixUnits> matrices_;  // those that multiply rounded rows
  Buffer weight_;
  Buffer image_;  // of the weight, if kernels read it so
};

}  // namespace flownpu::gpu
