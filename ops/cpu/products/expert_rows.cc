// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/products/expert_rows.h"

#include <algorithm>

#include "ops/cpu/products/q4nx_matmul_plan.h"
#include "ops/formats/q4nx.h"

namespace flownpu::cpu {

void choose_experts(std::span<const float> logits, std::span<std::int32_t> experts) {
  for (std::size_t rank = 0; rank < experts.size(); ++rank) {
    const auto chosen = experts.first(rank);
    std::int32_t best = -1;
    for (std::size_t i = 0; i < logits.size(); ++i) {
      const auto expert = static_cast<std::int32_t>(i);
      const bool better = best < 0 || logits[i] > logits[static_cast<std::size_t>(best)];
      if (better && std::ranges::find(chosen, expert) == chosen.end()) best = expert;
    }
    experts[rank] = best;
  }
  std::ranges::sort(experts);
}

RowsByExpert::RowsByExpert(Scratch& scratch, std::int64_t rows, std::int64_t experts_per_row,
                           std::int64_t experts)
    : experts_per_row_(experts_per_row), experts_(experts), choices_(rows * experts_per_row) {
  // An expert's last group may be smaller than the others.
  const std::int64_t groups = choices_ / kTaskRows + std::min(experts, choices_);
  chosen_ = scratch.take<std::int32_t>(choices_);
  weights_ = scratch.take<float>(choices_);
  order_ = scratch.take<std::int32_t>(choices_);
  places_ = scratch.take<std::int32_t>(choices_);
  begins_ = scratch.take<std::int32_t>(experts + 1);
  groups_ = scratch.take<ExpertRows>(groups);
  first_tasks_ = scratch.take<std::int64_t>(groups + 1);
}

void RowsByExpert::sort() {
  std::fill_n(begins_, experts_ + 1, 0);
  for (std::int64_t i = 0; i < choices_; ++i) ++begins_[chosen_[i] + 1];
  for (std::int64_t e = 0; e < experts_; ++e) begins_[e + 1] += begins_[e];
  group_count_ = 0;
  for (std::int64_t e = 0; e < experts_; ++e) {
    const std::int64_t rows = begins_[e + 1] - begins_[e];
    // Parts are nearly equal, so that no kernel takes one for a product of few rows.
    const std::int64_t parts = q4nx::ceil_div(rows, kTaskRows);
    for (std::int64_t i = 0; i < parts; ++i) {
      const auto [begin, end] = part(rows, parts, i);
      groups_[group_count_++] = {static_cast<std::int32_t>(e),
                                 static_cast<std::int32_t>(begins_[e] + begin),
                                 static_cast<std::int32_t>(end - begin)};
    }
  }
  for (std::int64_t i = 0; i < choices_; ++i) {
    const std::int32_t place = begins_[chosen_[i]]++;
    order_[place] = static_cast<std::int32_t>(i);
    places_[i] = place;
  }
}

const ExpertRows& RowsByExpert::group_of(std::int64_t place) const {
  const auto next = std::ranges::upper_bound(groups(), place, {}, &ExpertRows::first);
  return *(next - 1);
}

std::vector<ExpertRows> RowsByExpert::whole_groups() const {
  std::vector<ExpertRows> experts;
  for (const ExpertRows& group : groups()) {
    if (!experts.empty() && experts.back().expert == group.expert)
      experts.back().count += group.count;
    else
      experts.push_back(group);
  }
  return experts;
}

std::int64_t RowsByExpert::cut(std::int64_t row_blocks, std::int64_t threads) {
  // As many as plan_matmul makes for one weight.
  constexpr std::int64_t kTasksPerThread = 8;
  const std::int64_t wanted = kTasksPerThread * threads;
  std::int64_t tasks = 0;
  for (std::int64_t g = 0; g < group_count_; ++g) {
    first_tasks_[g] = tasks;
    tasks += std::clamp<std::int64_t>(q4nx::ceil_div(wanted * groups_[g].count, choices_), 1,
                                      row_blocks);
  }
  first_tasks_[group_count_] = tasks;
  return tasks;
}

RowsByExpert::Task RowsByExpert::task(std::int64_t number) const {
  const std::span firsts(first_tasks_, static_cast<std::size_t>(group_count_) + 1);
  const std::int64_t group = std::ranges::upper_bound(firsts, number) - firsts.begin() - 1;
  const std::int64_t first = first_tasks_[group];
  return {groups_[group], number - first, first_tasks_[group + 1] - first};
}

}  // namespace flownpu::cpu
