// SPDX-License-Identifier: Apache-2.0
// Q4NXMoE on the CPU. Rows of activations are sorted by the experts that they chose, so that the
// weights of each chosen expert are read once, and no others.
//
// A row's answers are added up in the order of experts, one after the other: with bf16 activations
// a row has the same bits whatever other rows there are. With int8, how an expert's rows are
// rounded depends on how many there are (Int8Order).
#include "ops/cpu/products/q4nx_moe.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "ops/cpu/checked_step.h"
#include "ops/cpu/products/expert_rows.h"
#include "ops/cpu/products/q4nx_matmul.h"
#include "ops/cpu/products/q4nx_product.h"
#include "ops/cpu/products/router.h"
#include "ops/error.h"
#include "ops/nodes/q4nx_moe.h"

namespace flownpu::cpu {
namespace {

// Answers of experts up to this many bytes, which fit into one or two second-level caches, are kept
// and added up afterwards. Threads then read weights expert by expert, in one stream. More answers
// are added to Y at once, by threads that have some columns each.
constexpr std::int64_t kKeptBytes = 2 << 20;

// Whether the node has a router, not its logits. Throws Error unless it has one of both, of the
// right shape, and enough experts.
bool is_routed(const Node& node, std::int64_t experts, std::int64_t per_row, std::int64_t hidden) {
  if (per_row > experts) {
    fail("[", to_string(node), "] expected experts_per_token to be at most num_experts, ", experts,
         ", got ", per_row);
  }
  const Value* router = node.input(kMoeRouter);
  if ((router == nullptr) == (node.input(kMoeLogits) == nullptr)) {
    fail("[", to_string(node), "] expected an input router, or router_logits, got ",
         router == nullptr ? "none" : "both");
  }
  const Shape expected{experts, hidden};
  if (router != nullptr && router->shape != expected) {
    fail("[", to_string(node), "] expected a router of shape ", to_string(expected), ", got ",
         router->shape ? to_string(*router->shape) : "an unknown shape");
  }
  const Value* bias = node.input(kMoeBias);
  if (bias != nullptr && bias->shape != Shape{experts}) {
    fail("[", to_string(node), "] expected a router_bias of shape [", experts, "], got ",
         bias->shape ? to_string(*bias->shape) : "an unknown shape");
  }
  if (bias != nullptr && node.integer("normalize_routing_weights", 1) == 0) {
    fail("[", to_string(node),
         "] expected normalize_routing_weights to be 1 beside a router_bias, got 0");
  }
  return router != nullptr;
}

// Throws Error unless the biases of logits and of experts, and their scales, have the right shapes.
void check_biases(const Node& node, std::int64_t experts, std::int64_t hidden, std::int64_t inner) {
  const std::pair<MoeInput, Shape> biases[] = {{kMoeLogitsBias, {experts}},
                                               {kMoeScales, {experts}},
                                               {kMoeGateUpBias, {experts, 2 * inner}},
                                               {kMoeDownBias, {experts, hidden}}};
  for (const auto& [input, expected] : biases) {
    const Value* bias = node.input(input);
    if (bias != nullptr && bias->shape != expected) {
      fail("[", to_string(node), "] expected ", kMoePorts[input].name, " of shape ",
           to_string(expected), ", got ",
           bias->shape ? to_string(*bias->shape) : "an unknown shape");
    }
  }
  if (node.input(kMoeLogitsBias) != nullptr && node.input(kMoeRouter) == nullptr)
    fail("[", to_string(node), "] expected a router beside logits_bias, got router_logits");
}

// The node's SwiGLU, if it is more than silu(gate) * up.
std::optional<SwigluScale> scale_of(const Node& node) {
  SwigluScale scale{.alpha = node.number("swiglu_alpha", 1), .beta = node.number("swiglu_beta", 0)};
  if (const float limit = node.number("swiglu_limit", 0); limit > 0) scale.limit = limit;
  const bool is_usual = scale.alpha == 1 && scale.beta == 0 && std::isinf(scale.limit);
  if (!is_usual && gating_of(node, "swiglu") != Gating::kSwiglu) {
    fail("[", to_string(node),
         "] expected gating to be swiglu beside swiglu_alpha, swiglu_beta or swiglu_limit, got ",
         node.text("gating", "swiglu"));
  }
  return is_usual ? std::nullopt : std::optional(scale);
}

class Q4NXMoE final : public Step {
 public:
  Q4NXMoE(const Node& node, const Context& context,
          std::unique_ptr<ExpertProducts> elsewhere = nullptr,
          const std::optional<ExpertPlaces>& places = std::nullopt)
      : context_(context),
        elsewhere_(std::move(elsewhere)),
        name_(to_string(node)),
        experts_(node.required_integer("num_experts")),
        per_row_(node.required_integer("experts_per_token")),
        hidden_(node.required_integer("hidden_size")),
        inner_(node.required_integer("expert_size")),
        has_router_(is_routed(node, experts_, per_row_, hidden_)),
        router_{experts_, per_row_, hidden_, node.integer("normalize_routing_weights", 1) != 0,
                node.input(kMoeBias) != nullptr},
        inner_blocks_(q4nx::row_blocks(inner_)),
        outer_blocks_(q4nx::row_blocks(hidden_)),
        gate_up_layout_(q4nx_layout(node, kMoeGateUp, experts_ * 2 * inner_blocks_, hidden_)),
        down_layout_(q4nx_layout(node, kMoeDown, experts_ * outer_blocks_, inner_)),
        gate_up_(context, hidden_, gate_up_layout_, gating_of(node, "swiglu"), scale_of(node)),
        down_(context, inner_, down_layout_, Gating::kNone),
        has_gate_up_bias_(node.input(kMoeGateUpBias) != nullptr),
        has_down_bias_(node.input(kMoeDownBias) != nullptr),
        has_logits_bias_(node.input(kMoeLogitsBias) != nullptr),
        has_scales_(node.input(kMoeScales) != nullptr) {
    check_biases(node, experts_, hidden_, inner_);
    if (has_router_) router_type_ = node.input(kMoeRouter)->type;
    places_ = places.value_or(
        ExpertPlaces{.gate_up = 2 * inner_blocks_ * gate_up_layout_.row_bytes(hidden_),
                     .down = outer_blocks_ * down_layout_.row_bytes(inner_)});
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& x = inputs[kMoeX].shape;
    if (x.rank() == 0 || x[-1] != hidden_)
      fail("[", name_, "] expected X of shape [.., ", hidden_, "], got ", to_string(x));
    if (!has_router_) {
      const Shape& logits = inputs[kMoeLogits].shape;
      const std::int64_t rows = x.elements() / hidden_;
      if (logits.rank() == 0 || logits[-1] != experts_ || logits.elements() != rows * experts_) {
        fail("[", name_, "] expected router_logits of ", rows, " x ", experts_, ", got ",
             to_string(logits));
      }
    }
    outputs[0] = x;
  }

  std::size_t scratch_bytes(std::span<const Tensor> inputs) const override {
    Scratch scratch;
    const Work work(*this, scratch, inputs[kMoeX].shape.elements() / hidden_);
    return scratch.bytes();
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> memory) const override {
    const std::int64_t rows = inputs[kMoeX].shape.elements() / hidden_;
    if (rows == 0) return;
    Scratch scratch(memory.data());
    Work work(*this, scratch, rows);
    if (has_gate_up_bias_) work.gate_up_bias = inputs[kMoeGateUpBias].as<const float>();
    if (has_down_bias_) work.down_bias = inputs[kMoeDownBias].as<const float>();
    const float* x = inputs[kMoeX].as<const float>();
    if (has_router_) {
      router_.rank(context_.kernels, *context_.pool,
                   DenseWeight{inputs[kMoeRouter].data, router_type_, hidden_, experts_, true}, x,
                   rows, work.logits);
      for (std::int64_t row = 0; has_logits_bias_ && row < rows; ++row) {
        float* of_row = work.logits + row * experts_;
        context_.kernels.add(of_row, inputs[kMoeLogitsBias].as<const float>(), of_row, experts_);
      }
    } else {
      std::memcpy(work.logits, inputs[kMoeLogits].data,
                  static_cast<std::size_t>(rows * experts_) * sizeof(float));
    }
    router_.choose(context_.kernels, *context_.pool, rows, work.logits,
                   router_.has_bias ? inputs[kMoeBias].as<const float>() : nullptr,
                   work.by_expert.chosen(), work.by_expert.weights());
    for (std::int64_t i = 0; has_scales_ && i < work.by_expert.choices(); ++i)
      work.by_expert.weights()[i] *=
          inputs[kMoeScales].as<const float>()[work.by_expert.chosen()[i]];
    work.by_expert.sort();
    if (elsewhere_ != nullptr && elsewhere_->takes(work.by_expert)) {
      elsewhere_->answer(x, work.by_expert, work.answers);
      return add_up(rows, work, outputs[0].as<float>());
    }
    round_by_expert(gate_up_, work.taken, work.by_expert,
                    [&](std::int64_t place) { return x + work.by_expert.row(place) * hidden_; });
    multiply_inwards(
        Q4NXRows(inputs[kMoeGateUp].as<const std::uint8_t>(), gate_up_layout_, hidden_), work);
    round_by_expert(down_, work.inside, work.by_expert,
                    [&](std::int64_t place) { return work.products + place * inner_; });
    const Q4NXRows down(inputs[kMoeDown].as<const std::uint8_t>(), down_layout_, inner_);
    if (work.answers != nullptr) {
      multiply_outwards(down, work);
      add_up(rows, work, outputs[0].as<float>());
    } else {
      multiply_and_add(down, rows, work, outputs[0].as<float>());
    }
  }

  // The router is read first. The experts that are read next are not known in advance.
  std::optional<std::size_t> streamed_input() const override {
    if (!has_router_) return std::nullopt;
    return kMoeRouter;
  }

  std::optional<Slicing> slicing(const Node& node) const override {
    return has_router_ ? slice_rows(node, {kMoeX}, 1) : slice_rows(node, {kMoeX, kMoeLogits}, 1);
  }

  std::int64_t multiply_adds() const override {
    return (has_router_ ? experts_ * hidden_ : 0) + per_row_ * 3 * hidden_ * inner_;
  }

 private:
  // Memory of a run; without memory, only counts.
  struct Work {
    Work(const Q4NXMoE& moe, Scratch& scratch, std::int64_t rows)
        : by_expert(scratch, rows, moe.per_row_, moe.experts_),
          logits(scratch.take<float>(moe.router_.numbers(rows))),
          taken(moe.gate_up_.take_for_several(scratch, by_expert.choices())),
          products(scratch.take<float>(by_expert.choices() * moe.inner_)),
          inside(moe.down_.take_for_several(scratch, by_expert.choices())) {
      const std::int64_t count = by_expert.choices() * moe.hidden_;
      const bool kept = moe.elsewhere_ != nullptr ||
                        count * static_cast<std::int64_t>(sizeof(float)) <= kKeptBytes;
      answers = kept ? scratch.take<float>(count) : nullptr;
    }

    RowsByExpert by_expert;
    float* logits;
    // Rows of X, and of act(gate) * up, in the order of experts.
    RoundedActivations taken;
    float* products;
    RoundedActivations inside;
    // The rows that experts compute, in the same order; null if they are not kept.
    float* answers;
    // Biases of all experts; null if they have none.
    const float* gate_up_bias = nullptr;
    const float* down_bias = nullptr;
  };

  // Rounds the row of each place for a product of as many rows as its group has.
  template <typename Source>
  void round_by_expert(const Q4NXProduct& product, const RoundedActivations& all,
                       const RowsByExpert& by_expert, const Source& source) const {
    context_.pool->run_rows(by_expert.choices(), [&](std::int64_t place) {
      const ExpertRows& group = by_expert.group_of(place);
      product.round(source(place), product.rows_of(all, group.first, group.count),
                    place - group.first);
    });
  }

  // Products of all groups with their expert's gate and up projection.
  void multiply_inwards(const Q4NXRows& weight, Work& work) const {
    const std::int64_t tasks = work.by_expert.cut(inner_blocks_, context_.pool->threads());
    context_.pool->run(tasks, [&](std::int64_t number) {
      const auto [group, index, parts] = work.by_expert.task(number);
      const auto [begin, end] = part(inner_blocks_, parts, index);
      Q4NXRows gate = weight;
      gate.bytes += group.expert * places_.gate_up;
      const std::int64_t to_up = (places_.in_turns ? 1 : inner_blocks_) * weight.row_bytes;
      if (places_.in_turns) gate.row_bytes *= 2;
      ProductBias bias{.m = inner_};
      if (work.gate_up_bias != nullptr) {
        bias.first = work.gate_up_bias + std::int64_t{2} * group.expert * inner_;
        bias.up = bias.first + inner_;
      }
      multiply_group(gate_up_, gate, to_up, work.taken, group, begin, end, bias, work.products);
    });
  }

  void multiply_outwards(const Q4NXRows& weight, Work& work) const {
    const std::int64_t tasks = work.by_expert.cut(outer_blocks_, context_.pool->threads());
    context_.pool->run(tasks, [&](std::int64_t number) {
      const auto [group, index, parts] = work.by_expert.task(number);
      const auto [begin, end] = part(outer_blocks_, parts, index);
      multiply_group(down_, down_of(weight, group), 0, work.inside, group, begin, end,
                     down_bias(work, group), work.answers);
    });
  }

  Q4NXRows down_of(Q4NXRows weight, const ExpertRows& group) const {
    weight.bytes += group.expert * places_.down;
    return weight;
  }

  ProductBias down_bias(const Work& work, const ExpertRows& group) const {
    if (work.down_bias == nullptr) return {.m = hidden_};
    return {.first = work.down_bias + group.expert * hidden_, .m = hidden_};
  }

  // y[place][bias.m] of a group's rows and some rows of blocks.
  void multiply_group(const Q4NXProduct& product, const Q4NXRows& weight, std::int64_t to_up,
                      const RoundedActivations& all, const ExpertRows& group, std::int64_t begin,
                      std::int64_t end, const ProductBias& bias, float* y) const {
    const ProductEpilogue epilogue{.y = y, .m = bias.m};
    product.multiply(
        weight, to_up, product.rows_of(all, group.first, group.count), 0, group.count, begin, end,
        [&](const float* made, std::int64_t block, std::int64_t blocks) {
          context_.kernels.finish_product(made, blocks, group.first, group.count,
                                          block * q4nx::kBlockRows, epilogue);
        },
        bias);
  }

  void add_up(std::int64_t rows, const Work& work, float* y) const {
    context_.pool->run_rows(rows, [&](std::int64_t row) {
      std::fill_n(y + row * hidden_, hidden_, 0.0F);
      // A row's choices are in the order of experts.
      for (std::int64_t choice = row * per_row_; choice < (row + 1) * per_row_; ++choice) {
        const std::int64_t place = work.by_expert.place(choice);
        context_.kernels.add_scaled(work.answers + place * hidden_, work.by_expert.weight(place),
                                    y + row * hidden_, hidden_);
      }
    });
  }

  // multiply_outwards and add_up for many rows: each task has some columns of Y, and goes through
  // all groups.
  void multiply_and_add(const Q4NXRows& weight, std::int64_t rows, const Work& work,
                        float* y) const {
    const std::int64_t parts =
        plan_matmul(rows, outer_blocks_, context_.pool->threads()).block_parts;
    context_.pool->run(parts, [&](std::int64_t index) {
      const auto [begin, end] = part(outer_blocks_, parts, index);
      const std::int64_t column = begin * q4nx::kBlockRows;
      const std::int64_t columns = std::min(end * q4nx::kBlockRows, hidden_) - column;
      for (std::int64_t row = 0; row < rows; ++row)
        std::fill_n(y + row * hidden_ + column, columns, 0.0F);
      for (const ExpertRows& group : work.by_expert.groups()) {
        down_.multiply(
            down_of(weight, group), 0, down_.rows_of(work.inside, group.first, group.count), 0,
            group.count, begin, end,
            [&](const float* made, std::int64_t block, std::int64_t blocks) {
              add_group(made, block, blocks, group, work, y);
            },
            down_bias(work, group));
      }
    });
  }

  // y[row] += weight * made[blocks][count][32] for the group's rows.
  void add_group(const float* made, std::int64_t block, std::int64_t blocks,
                 const ExpertRows& group, const Work& work, float* y) const {
    for (std::int64_t i = 0; i < group.count; ++i) {
      const std::int64_t place = group.first + i;
      float* row = y + work.by_expert.row(place) * hidden_;
      for (std::int64_t b = 0; b < blocks; ++b) {
        const std::int64_t column = (block + b) * q4nx::kBlockRows;
        context_.kernels.add_scaled(made + (b * group.count + i) * q4nx::kBlockRows,
                                    work.by_expert.weight(place), row + column,
                                    std::min(q4nx::kBlockRows, hidden_ - column));
      }
    }
  }

  Context context_;
  std::unique_ptr<ExpertProducts> elsewhere_;  // null: there is no other device
  std::string name_;
  std::int64_t experts_;
  std::int64_t per_row_;
  std::int64_t hidden_;
  std::int64_t inner_;
  bool has_router_;
  Router router_;
  std::int64_t inner_blocks_;
  std::int64_t outer_blocks_;
  q4nx::Layout gate_up_layout_;
  q4nx::Layout down_layout_;
  Q4NXProduct gate_up_;
  Q4NXProduct down_;
  bool has_gate_up_bias_;
  bool has_down_bias_;
  bool has_logits_bias_;
  bool has_scales_;
  DataType router_type_ = DataType::kFloat32;
  ExpertPlaces places_;
};

std::unique_ptr<Step> make_alone(const Node& node, const Context& context) {
  return std::make_unique<Q4NXMoE>(node, context);
}

constexpr Operator kOperators[] = {{kQ4nxMoe, make_alone}};

}  // namespace

std::span<const Operator> q4nx_moe_operators() { return kOperators; }

std::unique_ptr<Step> make_q4nx_moe(const Node& node, const Context& context,
                                    std::unique_ptr<ExpertProducts> elsewhere,
                                    const std::optional<ExpertPlaces>& places) {
  return std::make_unique<CheckedStep>(
      kOperators[0].contract, to_string(node),
      std::make_unique<Q4NXMoE>(node, context, std::move(elsewhere), places));
}

}  // namespace flownpu::cpu
