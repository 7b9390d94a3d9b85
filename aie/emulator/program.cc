// SPDX-License-Identifier: Apache-2.0
#include "aie/emulator/program.h"

#include <cstring>
#include <fstream>

namespace flownpu::emulator {
namespace {

constexpr std::int64_t kMagic = 0x0055504E776F6C46;  // "FlowNPU\0", little-endian
constexpr std::int64_t kArray = 1;
constexpr std::int64_t kSequence = 2;

// Words one after the other; every count is checked against what is left.
class Reader {
 public:
  explicit Reader(std::span<const std::int64_t> words) : words_(words) {}

  std::int64_t next() {
    if (at_ == words_.size()) throw Error("[emulator] the program ends in the middle");
    return words_[at_++];
  }
  std::size_t size() {
    const std::int64_t value = next();
    if (value < 0) throw Error("[emulator] expected a size, got " + std::to_string(value));
    return static_cast<std::size_t>(value);
  }
  bool flag() { return next() != 0; }
  // A number below `count`, of things called `what`.
  std::size_t index(std::size_t count, const char* what) {
    const std::size_t value = size();
    if (value >= count) {
      throw Error("[emulator] expected a number of one of " + std::to_string(count) + " " + what +
                  ", got " + std::to_string(value));
    }
    return value;
  }
  // How many items follow, of one word or more each.
  std::size_t count() {
    const std::size_t value = size();
    if (value > words_.size() - at_) throw Error("[emulator] the program ends in the middle");
    return value;
  }
  std::vector<std::byte> bytes() {
    const std::size_t size = this->size();
    const std::size_t words = (size + 7) / 8;
    if (words > words_.size() - at_) throw Error("[emulator] the program ends in the middle");
    std::vector<std::byte> bytes(size);
    if (size > 0) std::memcpy(bytes.data(), words_.data() + at_, size);
    at_ += words;
    return bytes;
  }
  std::string text() {
    const std::vector<std::byte> raw = bytes();
    return {reinterpret_cast<const char*>(raw.data()), raw.size()};
  }
  template <typename Make>
  auto list(Make make) {
    std::vector<decltype(make())> items;
    const std::size_t number = count();
    items.reserve(number);
    for (std::size_t i = 0; i < number; ++i) items.push_back(make());
    return items;
  }
  Walk walk() {
    const std::size_t item = size();
    return Walk::over(list([&] { return Dimension{next(), next(), next(), next()}; }), item);
  }
  std::int64_t head(std::int64_t kind) {
    if (next() != kMagic) throw Error("[emulator] this is no program of the emulator");
    if (const std::int64_t version = next(); version != kVersion) {
      throw Error("[emulator] expected a program of version " + std::to_string(kVersion) +
                  ", got version " + std::to_string(version) + ": write it again");
    }
    if (next() != kind) {
      throw Error(std::string("[emulator] expected ") +
                  (kind == kArray ? "an array" : "a sequence"));
    }
    return next();
  }

 private:
  std::span<const std::int64_t> words_;
  std::size_t at_ = 0;
};

Descriptor read_descriptor(Reader& reader, const Array& array) {
  Descriptor d{.memory = reader.index(array.memories.size(), "memories"),
               .offset = reader.size(),
               .bytes = reader.size(),
               .takes = reader.index(array.locks.size(), "locks"),
               .gives = reader.index(array.locks.size(), "locks"),
               .count = reader.next(),
               .gives_back = reader.size(),
               .walk = reader.walk()};
  const Memory& memory = array.memories[d.memory];
  if (d.offset + d.bytes > memory.bytes || d.walk.end() > d.bytes) {
    throw Error("[emulator] a descriptor of " + memory.name + " reaches byte " +
                std::to_string(d.offset + std::max(d.bytes, d.walk.end())) + ", it has " +
                std::to_string(memory.bytes) + ", this part " + std::to_string(d.bytes));
  }
  return d;
}

ChannelRecord read_channel(Reader& reader, const Array& array) {
  std::string name = reader.text();
  const std::size_t stream = reader.index(array.streams, "streams");
  const bool source = reader.flag();
  return {std::move(name), stream, source,
          reader.list([&] { return read_descriptor(reader, array); })};
}

EndRecord read_end(Reader& reader, const Array& array) {
  std::string name = reader.text();
  const std::size_t takes = reader.index(array.locks.size(), "locks");
  const std::size_t gives = reader.index(array.locks.size(), "locks");
  const std::int64_t count = reader.next();
  const bool consumes = reader.flag();
  return {std::move(name),
          takes,
          gives,
          count,
          consumes,
          reader.list([&] { return reader.index(array.memories.size(), "memories"); })};
}

}  // namespace

Array read_array(std::span<const std::int64_t> words) {
  Reader reader(words);
  Array array{};
  array.identity = reader.head(kArray);
  array.target = reader.text();
  array.task_queue = reader.size();
  array.memories = reader.list([&] {
    std::string name = reader.text();
    const std::size_t bytes = reader.size();
    const bool parameters = reader.flag();
    return Memory{std::move(name), bytes, parameters, reader.bytes()};
  });
  array.locks = reader.list([&] {
    std::string name = reader.text();
    return LockRecord{std::move(name), reader.next()};
  });
  array.streams = reader.size();
  array.kernels = reader.list([&] {
    std::string entry = reader.text();
    return KernelRecord{std::move(entry), reader.list([&] { return reader.size(); })};
  });
  array.channels = reader.list([&] { return read_channel(reader, array); });
  array.ends = reader.list([&] { return read_end(reader, array); });
  array.cores = reader.list([&] {
    std::string name = reader.text();
    const bool forever = reader.flag();
    const std::size_t variables = reader.size();
    const std::size_t views = reader.size();
    return CoreRecord{std::move(name), forever, variables, views,
                      reader.list([&] { return reader.next(); })};
  });
  return array;
}

Sequence read_sequence(std::span<const std::int64_t> words) {
  Reader reader(words);
  Sequence sequence{};
  sequence.identity = reader.head(kSequence);
  sequence.name = reader.text();
  sequence.buffers = reader.list([&] {
    std::string name = reader.text();
    return HostBuffer{std::move(name), reader.size()};
  });
  sequence.steps = reader.list([&] {
    Step step{static_cast<StepKind>(reader.next()), 0, 0, 0};
    switch (step.kind) {
      case StepKind::kTransfer: {
        step.what = sequence.transfers.size();
        Transfer transfer{};
        transfer.name = reader.text();
        transfer.channel = reader.size();
        transfer.buffer = reader.index(sequence.buffers.size(), "host buffers");
        transfer.offset = reader.size();
        transfer.token = reader.flag();
        transfer.walk = reader.walk();
        sequence.transfers.push_back(std::move(transfer));
        break;
      }
      case StepKind::kAwait:
      case StepKind::kFree:
        step.what = reader.index(sequence.transfers.size(), "transfers started before");
        break;
      case StepKind::kWrite:
        step.what = reader.size();
        step.index = reader.size();
        step.value = reader.next();
        break;
      case StepKind::kSet:
        step.what = reader.size();
        step.value = reader.next();
        break;
      default:
        throw Error("[emulator] a step of an unknown kind");
    }
    return step;
  });
  return sequence;
}

std::vector<std::int64_t> read_words(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) throw Error("[emulator] " + path + " cannot be read");
  const auto bytes = static_cast<std::size_t>(file.tellg());
  std::vector<std::int64_t> words(bytes / sizeof(std::int64_t));
  file.seekg(0);
  file.read(reinterpret_cast<char*>(words.data()),
            static_cast<std::streamsize>(words.size() * sizeof(std::int64_t)));
  if (!file) throw Error("[emulator] " + path + " cannot be read");
  return words;
}

}  // namespace flownpu::emulator
