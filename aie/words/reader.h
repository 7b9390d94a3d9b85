// SPDX-License-Identifier: Apache-2.0
// Reads the words that aie/words/writer.py describes: runs of 64-bit integers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace flownpu::words {

// Thrown if words, or the described objects, are wrong. The message has the place, the expectation
// and the finding.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Raise this number, here and in writer.py, whenever a change gives words of earlier versions
// another meaning.
inline constexpr std::int64_t kVersion = 6;

// The contents of a file or a run of words.
enum class WordKind : std::int64_t { kArray = 1, kSequence = 2, kIndex = 3, kFamily = 4 };

// Reads words one after the other. Every count is checked against the remaining words. All
// functions throw Error if the words end too early or a number is out of range.
class WordReader {
 public:
  // `what`: the name of the words in messages, "[emulator] the program".
  WordReader(std::span<const std::int64_t> words, std::string what)
      : words_(words), what_(std::move(what)) {}

  std::int64_t next() {
    if (at_ == words_.size()) fail(" ends in the middle");
    return words_[at_++];
  }
  std::size_t size() {
    const std::int64_t value = next();
    if (value < 0) fail(": expected a size, got " + std::to_string(value));
    return static_cast<std::size_t>(value);
  }
  bool flag() { return next() != 0; }
  // A number below `count`, the number of items that messages call `what`.
  std::size_t index(std::size_t count, const char* what) {
    const std::size_t value = size();
    if (value >= count) {
      fail(": expected a number of one of " + std::to_string(count) + " " + what + ", got " +
           std::to_string(value));
    }
    return value;
  }
  // The number of following items, each of one word or more.
  std::size_t count() {
    const std::size_t value = size();
    if (value > words_.size() - at_) fail(" ends in the middle");
    return value;
  }
  // A length in bytes, then the bytes, eight a word.
  std::vector<std::byte> bytes();
  std::string text();
  // A count, then as many items, each read by `make`.
  template <typename Make>
  auto list(Make make) {
    std::vector<decltype(make())> items;
    const std::size_t number = count();
    items.reserve(number);
    for (std::size_t i = 0; i < number; ++i) items.push_back(make());
    return items;
  }
  std::vector<std::int64_t> integers() {
    return list([this] { return next(); });
  }
  // Reads the head of words of this kind, and returns their identity; the body follows.
  std::int64_t head(WordKind kind);
  // The words that were not read yet.
  [[nodiscard]] std::span<const std::int64_t> rest() const { return words_.subspan(at_); }

 private:
  [[noreturn]] void fail(const std::string& why) const { throw Error(what_ + why); }

  std::span<const std::int64_t> words_;
  std::string what_;
  std::size_t at_ = 0;
};

// A file of words, little-endian. Throws Error if it cannot be read, or ends within a word.
std::vector<std::int64_t> read_words(const std::filesystem::path& path);

}  // namespace flownpu::words
