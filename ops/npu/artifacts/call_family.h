// SPDX-License-Identifier: Apache-2.0
// CallFamily: the words of a call for every position in a context (aie/programs/call_family.py
// derives it).
//
// Within a class of positions all words are the same but for some that depend on *features*, as an
// integer combination of them:
//
//   word = base + sum over features of coefficient x feature
//
// Features: the position (tokens before the call's first), then for each *sweep* of the call over
// the KV cache (aie/designs/attention.py) the number of its first chunk and how many chunks it has.
// The class is told by how many tasks of at most `chunks_of_a_task` chunks each sweep takes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace flownpu::npu {

// Queries at position + offset .. + queries that see `window` keys (0: all) of position + tokens.
struct SweepRecord {
  std::int64_t offset = 0;
  std::int64_t queries = 1;
  std::int64_t tokens = 1;
  std::int64_t window = 0;
};

class CallFamily {
 public:
  struct Patch {
    std::size_t word;
    std::size_t feature;
    std::int64_t coefficient;
  };
  struct Class {
    std::vector<std::int64_t> tasks;  // of each sweep
    std::vector<std::int64_t> words;
    std::vector<Patch> patches;  // by word
  };

  // Reads what aie/programs/call_family.py writes. Throws Error if it is something else.
  static CallFamily read(std::span<const std::int64_t> words);

  // For messages: "decode_layer_0_26".
  const std::string& name() const { return name_; }
  // Positions 0 .. positions() - 1 have words.
  std::int64_t positions() const { return positions_; }
  // The class of a position. Throws Error, with both, if there are no words for it.
  std::size_t class_of(std::int64_t position) const;
  const Class& at(std::size_t number) const { return classes_[number]; }
  // Calls write(word, value) for each word of the position's class that depends on it.
  template <typename Write>
  void patch(std::int64_t position, const Write& write) const {
    const Class& members = classes_[class_of(position)];
    const std::vector<std::int64_t> features = this->features(position);
    for (std::size_t i = 0; i < members.patches.size();) {
      const std::size_t word = members.patches[i].word;
      // Unsigned, so that what is no word any more becomes one, and not undefined.
      auto value = static_cast<std::uint64_t>(members.words[word]);
      for (; i < members.patches.size() && members.patches[i].word == word; ++i)
        value += static_cast<std::uint64_t>(members.patches[i].coefficient) *
                 static_cast<std::uint64_t>(features[members.patches[i].feature]);
      write(word, static_cast<std::int64_t>(value));
    }
  }

 private:
  std::vector<std::int64_t> features(std::int64_t position) const;

  std::string name_;
  std::int64_t positions_ = 0;
  std::int64_t keys_ = 1;  // positions of a chunk
  std::int64_t chunks_of_a_task_ = 1;
  std::vector<SweepRecord> sweeps_;
  std::vector<Class> classes_;
};

}  // namespace flownpu::npu
