// SPDX-License-Identifier: Apache-2.0
// CallFamily: the words of a call for every position in a context (derived by
// aie/programs/call_family.py).
//
// Positions are divided into classes. Within a class, words are constant or an integer combination
// of *features* of the position:
//
//   word = base + sum over features of coefficient x feature
//
// The features are the position (the number of tokens before the call's first) and, for each
// *sweep* of the call over the KV cache (aie/designs/attention.py), the number of its first chunk
// and how many chunks it has. Positions are in one class if their sweeps take the same numbers of
// tasks; a task has at most `chunks_of_a_task` chunks. Features behind these are *choices*: numbers
// that the caller gives with the position, such as those of the experts that a token chose.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace flownpu::npu {

// A sweep: `queries` queries from the position position + offset on. Each query sees `window` keys
// (0: all) of the first position + tokens keys.
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
    std::vector<std::int64_t> tasks;  // how many each sweep takes
    std::vector<std::int64_t> words;
    std::vector<Patch> patches;  // in the order of their words
  };

  // Reads the words that aie/programs/call_family.py writes. Throws Error for other words.
  static CallFamily read(std::span<const std::int64_t> words);

  // For messages: "decode_layer_0_26".
  const std::string& name() const { return name_; }
  // Positions 0 .. positions() - 1 have words.
  std::int64_t positions() const { return positions_; }
  // How many choices a call has.
  std::size_t choices() const { return choices_; }
  // The class of a position. Throws Error, with call and position, if there are no words for it.
  std::size_t class_of(std::int64_t position) const;
  const Class& at(std::size_t number) const { return classes_[number]; }
  // Calls write(word, value) for each word of the position's class that depends on the position, or
  // on the choices; there are choices() of these.
  template <typename Write>
  void patch(std::int64_t position, const Write& write,
             std::span<const std::int64_t> choices = {}) const {
    const Class& members = classes_[class_of(position)];
    std::vector<std::int64_t> features = this->features(position);
    features.insert(features.end(), choices.begin(), choices.end());
    for (std::size_t i = 0; i < members.patches.size();) {
      const std::size_t word = members.patches[i].word;
      // Unsigned, because damaged coefficients may overflow, and signed overflow is undefined.
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
  std::int64_t keys_ = 1;  // positions in a chunk
  std::int64_t chunks_of_a_task_ = 1;
  std::size_t choices_ = 0;
  std::vector<SweepRecord> sweeps_;
  std::vector<Class> classes_;
};

}  // namespace flownpu::npu
