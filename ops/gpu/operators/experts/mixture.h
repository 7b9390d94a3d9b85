// SPDX-License-Identifier: Apache-2.0
// Mixture: a Q4NXMoE (ops/nodes/q4nx_moe.h) on the device: as an operator (step.cc), and in a
// decoder's layers. A row alone, or rows that are not rounded, read the weights of their experts
// each; several rounded rows are sorted by expert, so that tiles of them read an expert's weight
// once. The host takes no part in it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "ops/device.h"
#include "ops/gpu/context/context.h"
#include "ops/gpu/kernels/experts/kernels.h"
#include "ops/gpu/kernels/kernels.h"
#include "ops/nodes/q4nx_moe.h"

namespace flownpu::gpu {

struct MixtureShape {
  RouterShape router;
  std::int64_t inner = 0;  // rows of an expert's gate
  Gating gating = Gating::kSwiGlu;
  float alpha = 1;
  float beta = 0;
  float limit = 0;

  // Bytes that a MixtureMemory of so many rows has.
  std::int64_t bytes(std::int64_t rows) const;
};

// The inputs of a Q4NXMoE from its router on; absent ones have no handle.
struct MixtureWeights {
  static constexpr std::size_t kValues = kMoeScales - kMoeRouter + 1;

  std::vector<Buffer> inputs;  // kValues
  Element router = Element::kFloat32;
  q4nx::Layout gate_up;
  q4nx::Layout down;

  const Buffer& of(MoeInput input) const { return inputs[input - kMoeRouter]; }
  bool has(MoeInput input) const { return of(input).handle() != nullptr; }
};

// `values`: at most kValues, of which the host has checked types and shapes; `place` brings a
// constant to the device. Values that are not constants are absent.
MixtureWeights place_mixture(std::span<const Value> values,
                             const std::function<Buffer(const Value&)>& place);

// The values that a mixture's kernels hand on. Mixtures that run one after another share them.
struct MixtureMemory {
  enum Part : std::uint8_t {
    kLogits,
    kChosen,
    kShares,
    kOrder,
    kTiles,
    kCodes,
    kScales,
    kSums,
    kGated,
    kAnswers,
    kParts,
  };
  std::vector<Buffer> parts;
  std::int64_t rows = 0;

  // Makes room for so many rows. Throws GpuError; Error for more than indices reach.
  void reserve(Context& context, const MixtureShape& shape, std::int64_t most);
};

class Mixture {
 public:
  struct Options {
    bool rounds = true;
    GpuMatrices matrices = GpuMatrices::kAuto;
    Element activation = Element::kFloat32;  // of x
  };
  // `weights` must outlive it; what these have completes `shape`. The context's mutex is held, here
  // and below. Throws GpuError; Error for more experts than kernels take, and for matrix units that
  // are wanted and not right.
  Mixture(Context& context, const MixtureShape& shape, const MixtureWeights& weights,
          const Options& options);

  // Enqueues y f32 [rows, hidden] = the mixture of x [rows, hidden], plus the residual if there is
  // one. `logits`: f32 [rows, experts], in the place of a router's.
  void enqueue(Context& context, MixtureMemory& memory, std::int64_t rows, const Buffer* x,
               const Buffer* y, const Buffer* residual = nullptr,
               const Buffer* logits = nullptr) const;

 private:
  using Compiled = std::shared_ptr<const CompiledKernel>;
  // A product with the chosen experts' weights.
  struct Product {
    ProductShape shape;
    const Buffer* weight = nullptr;
    const Buffer* bias = nullptr;
    std::int64_t share = 1;  // choices that read the same row of x
    Compiled fused;
    Compiled quantize;
    Compiled rounded;
  };

  Product compile_product(Context& context, ProductShape shape, MoeInput weight,
                          const Options& options) const;
  void multiply(Context& context, const MixtureMemory& memory, const Product& product,
                std::int64_t choices, const Buffer* x, const Buffer* y, bool sorted) const;

  MixtureShape shape_;
  const MixtureWeights& weights_;
  bool rounds_;
  std::optional<MatrixUnits> matrices_;  // those that multiply rounded rows
  Compiled logits_;
  Compiled choose_;
  Compiled sort_;
  Compiled sum_;
  Compiled sum_with_residual_;
  Product gate_up_;
  Product down_;
};

}  // namespace flownpu::gpu
