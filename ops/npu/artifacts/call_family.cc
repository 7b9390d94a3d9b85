// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/artifacts/call_family.h"

#include <algorithm>

#include "aie/words/reader.h"
#include "ops/error.h"

namespace flownpu::npu {
namespace {

using words::WordReader;

// With this limit, numbers that are computed from positions fit 64 bits.
constexpr std::int64_t kMostPositions = std::int64_t{1} << 31;

constexpr std::size_t kMostChoices = 1 << 12;  // as many as there may be experts

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

CallFamily::Class read_class(WordReader& reader, std::size_t features) {
  CallFamily::Class members{reader.integers(), reader.integers(), {}};
  members.patches = reader.list([&] {
    return CallFamily::Patch{reader.index(members.words.size(), "words"),
                             reader.index(features, "features"), reader.next()};
  });
  return members;
}

}  // namespace

CallFamily CallFamily::read(std::span<const std::int64_t> words) try {
  WordReader reader(words, "the family of calls");
  reader.head(words::WordKind::kFamily);
  CallFamily family;
  family.name_ = reader.text();
  reader.next();  // the array's identity, which the words of a sequence repeat
  family.positions_ = reader.next();
  family.keys_ = reader.next();
  family.chunks_of_a_task_ = reader.next();
  family.choices_ = reader.index(kMostChoices, "choices");
  family.sweeps_ = reader.list(
      [&] { return SweepRecord{reader.next(), reader.next(), reader.next(), reader.next()}; });
  const std::size_t features = 1 + 2 * family.sweeps_.size() + family.choices_;
  family.classes_ = reader.list([&] { return read_class(reader, features); });
  const auto within = [](std::int64_t value, std::int64_t least) {
    return value >= least && value <= kMostPositions;
  };
  if (!within(family.keys_, 1) || !within(family.chunks_of_a_task_, 1)) {
    fail("[FlowNPU] call ", family.name_, ": expected chunks and tasks of 1 or more, got ",
         family.keys_, " positions of a chunk and ", family.chunks_of_a_task_, " chunks of a task");
  }
  for (const SweepRecord& sweep : family.sweeps_) {
    if (!within(sweep.offset, 0) || !within(sweep.queries, 1) || !within(sweep.tokens, 1) ||
        !within(sweep.window, 0)) {
      fail("[FlowNPU] call ", family.name_, ": a sweep has ", sweep.queries, " queries from token ",
           sweep.offset, " of ", sweep.tokens, " on, and a window of ", sweep.window);
    }
  }
  if (!within(family.positions_, 0))
    fail("[FlowNPU] call ", family.name_, ": expected positions, got ", family.positions_);
  for (const Class& members : family.classes_) {
    if (members.tasks.size() != family.sweeps_.size())
      fail("[FlowNPU] call ", family.name_, ": a class has tasks of ", members.tasks.size(),
           " sweeps, the call has ", family.sweeps_.size());
  }
  return family;
} catch (const words::Error& error) {
  fail("[FlowNPU] ", error.what());
}

// As `sweep` in aie/designs/attention.py: the chunks from the one with the first key that a query
// sees to the one with the last.
std::vector<std::int64_t> CallFamily::features(std::int64_t position) const {
  std::vector<std::int64_t> features{position};
  features.reserve(1 + 2 * sweeps_.size());
  for (const SweepRecord& sweep : sweeps_) {
    const std::int64_t query = position + sweep.offset;
    const std::int64_t last = std::min(position + sweep.tokens, query + sweep.queries);
    const std::int64_t visible =
        sweep.window > 0 ? std::max<std::int64_t>(0, query - sweep.window + 1) : 0;
    const std::int64_t first = std::min(visible, last - 1) / keys_;
    features.push_back(first);
    features.push_back(ceil_div(last - first * keys_, keys_));
  }
  return features;
}

std::size_t CallFamily::class_of(std::int64_t position) const {
  if (position < 0 || position >= positions_) {
    fail("[FlowNPU] call ", name_, ": expected a position of 0..", positions_ - 1, ", got ",
         position, "; build the model's artifacts for a longer context");
  }
  const std::vector<std::int64_t> features = this->features(position);
  const auto same = [&](const Class& members) {
    for (std::size_t i = 0; i < sweeps_.size(); ++i) {
      if (members.tasks[i] != ceil_div(features[2 + 2 * i], chunks_of_a_task_)) return false;
    }
    return true;
  };
  const auto found = std::find_if(classes_.begin(), classes_.end(), same);
  if (found == classes_.end())
    fail("[FlowNPU] call ", name_, " has no words for position ", position,
         ": build the model's artifacts again");
  return static_cast<std::size_t>(found - classes_.begin());
}

}  // namespace flownpu::npu
