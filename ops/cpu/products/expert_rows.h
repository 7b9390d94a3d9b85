// SPDX-License-Identifier: Apache-2.0
// Assigns rows of activations to experts, and cuts the work into tasks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ops/cpu/step.h"

namespace flownpu::cpu {

// Sets `experts` to those with the largest logits, sorted by their numbers; of equal logits the
// lower number wins. A comparison with NaN is false, so a NaN loses to earlier logits and wins over
// later ones. logits.size() >= experts.size().
void choose_experts(std::span<const float> logits, std::span<std::int32_t> experts);

// Rows that one expert computes together.
struct ExpertRows {
  std::int32_t expert;
  // Places [first, first + count) in the order of experts; 0 < count <= kTaskRows.
  std::int32_t first;
  std::int32_t count;
};

// The choices of all rows, by experts. A choice is a row with one of its experts: number
// row * experts_per_row + i.
class RowsByExpert {
 public:
  // Takes memory from `scratch`; a scratch without memory only counts.
  RowsByExpert(Scratch& scratch, std::int64_t rows, std::int64_t experts_per_row,
               std::int64_t experts);

  // For choice `row * experts_per_row + i`: its expert, and the factor of the expert's answer.
  std::int32_t* chosen() const { return chosen_; }
  float* weights() const { return weights_; }

  // Sorts the choices by experts, and the choices of an expert by rows.
  void sort();
  std::int64_t choices() const { return choices_; }
  // A place is a position in the order of experts: the choice at a place, and the place of a
  // choice.
  std::int32_t choice(std::int64_t place) const { return order_[place]; }
  std::int32_t place(std::int64_t choice) const { return places_[choice]; }
  std::int64_t row(std::int64_t place) const { return order_[place] / experts_per_row_; }
  float weight(std::int64_t place) const { return weights_[order_[place]]; }
  std::span<const ExpertRows> groups() const {
    return {groups_, static_cast<std::size_t>(group_count_)};
  }
  const ExpertRows& group_of(std::int64_t place) const;
  // All rows of each expert, for the experts that have any: neighbouring groups as one.
  std::vector<ExpertRows> whole_groups() const;

  // Cuts the products of all groups with weights of `row_blocks` rows of blocks into tasks of about
  // equal work. Tasks follow the order of the weights in memory; each thread gets several. Returns
  // how many there are.
  std::int64_t cut(std::int64_t row_blocks, std::int64_t threads);
  // A task of the last cut: a group, and part `index` of `parts` of its rows of blocks.
  struct Task {
    const ExpertRows& group;
    std::int64_t index;
    std::int64_t parts;
  };
  Task task(std::int64_t number) const;

 private:
  std::int64_t experts_per_row_;
  std::int64_t experts_;
  std::int64_t choices_;
  std::int32_t* chosen_;
  float* weights_;
  std::int32_t* order_;
  std::int32_t* places_;
  // [experts + 1]: where each expert's choices begin; for sort().
  std::int32_t* begins_;
  ExpertRows* groups_;
  // [groups + 1]: the first task of each group.
  std::int64_t* first_tasks_;
  std::int64_t group_count_ = 0;
};

}  // namespace flownpu::cpu
