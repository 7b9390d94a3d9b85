// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "ops/cpu/products/q4nx_moe.h"
#include "ops/formats/q4nx.h"
#include "ops/npu/operators/steps.h"

namespace flownpu::npu {
namespace {

using cpu::ExpertRows;
using cpu::RowsByExpert;

// The programs of the product with gate and up projections, and of that with the down projection.
using Expert = std::array<std::unique_ptr<OperatorPrograms>, 2>;

class ArrayExperts final : public cpu::ExpertProducts {
 public:
  ArrayExperts(const Node& node, std::vector<Expert> experts, const cpu::Context& context)
      : experts_(std::move(experts)),
        context_(context),
        gate_(node.text("gating", "swiglu") == "geglu" ? context.kernels.geglu
                                                       : context.kernels.swiglu),
        hidden_(node.required_integer("hidden_size")),
        inner_(node.required_integer("expert_size")) {}

  bool takes(const RowsByExpert& by_expert) const override {
    std::int64_t multiply_adds = 0;
    std::int64_t dispatches = 0;
    for (const ExpertRows& rows : by_expert.whole_groups()) {
      for (const auto& programs : experts_[static_cast<std::size_t>(rows.expert)]) {
        const std::int64_t made = dispatches_of(parts_of(programs->records(), rows.count));
        if (made == 0) return false;
        dispatches += made;
        multiply_adds += rows.count * programs->description().multiply_adds;
      }
    }
    return experts_.front().front()->is_worth(multiply_adds, dispatches);
  }

  void answer(const float* x, const RowsByExpert& by_expert, float* answers) const override {
    const std::unique_lock lock = experts_.front().front()->begin();
    std::vector<float> given;
    std::vector<float> gated;
    std::vector<float> made;
    for (const ExpertRows& rows : by_expert.whole_groups()) {
      const auto& [gate_up, down] = experts_[static_cast<std::size_t>(rows.expert)];
      given.resize(static_cast<std::size_t>(rows.count * hidden_));
      for (std::int64_t i = 0; i < rows.count; ++i)
        std::copy_n(x + by_expert.row(rows.first + i) * hidden_, hidden_,
                    given.data() + i * hidden_);
      const std::int64_t up = q4nx::row_blocks(inner_) * q4nx::kBlockRows;
      made.resize(static_cast<std::size_t>(std::int64_t{2} * rows.count * up));
      gate_up->multiply(given.data(), rows.count, made.data());
      gated.resize(static_cast<std::size_t>(rows.count * inner_));
      context_.pool->run_rows(rows.count, [&](std::int64_t row) {
        const float* from = made.data() + row * 2 * up;
        gate_(from, from + up, gated.data() + row * inner_, inner_);
      });
      const std::int64_t columns = q4nx::row_blocks(hidden_) * q4nx::kBlockRows;
      made.resize(static_cast<std::size_t>(rows.count * columns));
      down->multiply(gated.data(), rows.count, made.data());
      for (std::int64_t i = 0; i < rows.count; ++i)
        std::copy_n(made.data() + i * columns, hidden_, answers + (rows.first + i) * hidden_);
    }
  }

 private:
  std::vector<Expert> experts_;
  cpu::Context context_;
  void (*gate_)(const float* gate, const float* up, float* y, std::int64_t n);
  std::int64_t hidden_;
  std::int64_t inner_;
};

}  // namespace

std::unique_ptr<Step> make_mixture_step(
    const Node& node,
    const std::function<std::unique_ptr<OperatorPrograms>(const Node&)>& programs_of,
    const cpu::Context& context) {
  const std::int64_t count = node.required_integer("num_experts");
  std::vector<Expert> experts;
  experts.reserve(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    experts.push_back({programs_of(expert_product(node, ExpertPart::kGateUp, i)),
                       programs_of(expert_product(node, ExpertPart::kDown, i))});
  }
  return cpu::make_q4nx_moe(operator_of_graph(node), context,
                            std::make_unique<ArrayExperts>(node, std::move(experts), context));
}

}  // namespace flownpu::npu
