// SPDX-License-Identifier: Apache-2.0
#include "aie/emulator/program.h"

#include <algorithm>
#include <utility>

#include "aie/emulator/core_code.h"

namespace flownpu::emulator {
namespace {

constexpr const char* kProgram = "[emulator] the program";

// More than any tile's memory has: the largest is 512 KiB (aie/plan/limits.py).
constexpr std::size_t kMostBytes = std::size_t{1} << 30;

// A walk whose number of bytes, and whose highest byte, do not overflow.
Walk read_walk(WordReader& reader) {
  const std::size_t item = reader.size();
  auto bytes = static_cast<std::int64_t>(item);
  auto end = static_cast<std::int64_t>(item);
  std::vector<Dimension> dimensions = reader.list([&] {
    const Dimension d{reader.next(), reader.next()};
    std::int64_t last = 0;
    // A dimension of size 0 has no last step.
    if (d.size < 0 || d.stride < 0 || __builtin_mul_overflow(bytes, d.size, &bytes) ||
        __builtin_mul_overflow(std::max<std::int64_t>(d.size - 1, 0), d.stride, &last) ||
        __builtin_add_overflow(end, last, &end)) {
      throw Error("[emulator] a walk has a dimension of " + std::to_string(d.size) + " steps of " +
                  std::to_string(d.stride) + " bytes");
    }
    return d;
  });
  Walk walk = Walk::over(std::move(dimensions), item);
  if (walk.dimensions.size() > Cursor::kMost)
    throw Error("[emulator] a walk has " + std::to_string(walk.dimensions.size()) + " dimensions");
  return walk;
}

Memory read_memory(WordReader& reader) {
  std::string name = reader.text();
  const std::size_t bytes = reader.size();
  const bool parameters = reader.flag();
  Memory memory{std::move(name), bytes, parameters, reader.bytes()};
  if (bytes > kMostBytes || memory.initial.size() > bytes) {
    throw Error("[emulator] " + memory.name + " has " + std::to_string(bytes) +
                " bytes, of which " + std::to_string(memory.initial.size()) + " have values");
  }
  return memory;
}

Descriptor read_descriptor(WordReader& reader, const Array& array) {
  Descriptor d{.memory = reader.index(array.memories.size(), "memories"),
               .offset = reader.size(),
               .bytes = reader.size(),
               .takes = reader.index(array.locks.size(), "locks"),
               .gives = reader.index(array.locks.size(), "locks"),
               .gives_back = reader.size(),
               .walk = read_walk(reader)};
  const Memory& memory = array.memories[d.memory];
  if (d.offset + d.bytes > memory.bytes || d.walk.end() > d.bytes || d.gives_back > d.bytes) {
    throw Error("[emulator] a descriptor of " + memory.name + " reaches byte " +
                std::to_string(d.offset + std::max({d.bytes, d.walk.end(), d.gives_back})) +
                ", it has " + std::to_string(memory.bytes) + ", this part " +
                std::to_string(d.bytes));
  }
  return d;
}

ChannelRecord read_channel(WordReader& reader, const Array& array) {
  std::string name = reader.text();
  const std::size_t stream = reader.index(array.streams, "streams");
  const bool source = reader.flag();
  return {std::move(name), stream, source,
          reader.list([&] { return read_descriptor(reader, array); })};
}

EndRecord read_end(WordReader& reader, const Array& array) {
  std::string name = reader.text();
  const std::size_t takes = reader.index(array.locks.size(), "locks");
  const std::size_t gives = reader.index(array.locks.size(), "locks");
  const bool consumes = reader.flag();
  EndRecord end{std::move(name), takes, gives, consumes, {}};
  end.objects = reader.list([&] { return reader.index(array.memories.size(), "memories"); });
  if (end.objects.empty()) throw Error("[emulator] the " + end.name + " has no objects");
  return end;
}

// Throws Error unless each stream has one channel that sends.
void check_streams(const Array& array) {
  std::vector<std::size_t> sources(array.streams, 0);
  for (const ChannelRecord& channel : array.channels) sources[channel.stream] += channel.source;
  if (std::ranges::any_of(sources, [](std::size_t count) { return count != 1; }))
    throw Error("[emulator] a stream has no source, or several");
}

}  // namespace

Array read_array(std::span<const std::int64_t> words) {
  WordReader reader(words, kProgram);
  Array array{};
  array.identity = reader.head(WordKind::kArray);
  array.target = reader.text();
  array.task_queue = reader.size();
  array.memories = reader.list([&] { return read_memory(reader); });
  array.locks = reader.list([&] {
    std::string name = reader.text();
    return LockRecord{std::move(name), reader.next()};
  });
  array.streams = reader.count();  // at most the words left: each stream has channels
  array.kernels = reader.list([&] {
    std::string entry = reader.text();
    return KernelRecord{std::move(entry), reader.list([&] { return reader.size(); })};
  });
  array.channels = reader.list([&] { return read_channel(reader, array); });
  array.ends = reader.list([&] { return read_end(reader, array); });
  array.cores = reader.list([&] {
    std::string name = reader.text();
    const bool forever = reader.flag();
    const std::size_t variables = reader.count();  // at most the words left: the code uses each
    const std::size_t views = reader.count();
    return CoreRecord{std::move(name), forever, variables, views, reader.integers()};
  });
  check_streams(array);
  for (const CoreRecord& core : array.cores) check_code(core, array);
  return array;
}

Sequence read_sequence(std::span<const std::int64_t> words) {
  WordReader reader(words, kProgram);
  Sequence sequence{};
  sequence.identity = reader.head(WordKind::kSequence);
  sequence.name = reader.text();
  sequence.buffers = reader.list([&] {
    std::string name = reader.text();
    return HostBuffer{std::move(name), reader.size()};
  });
  sequence.steps = reader.list([&] {
    HostAction step{static_cast<HostActionKind>(reader.next()), 0, 0, 0};
    switch (step.kind) {
      case HostActionKind::kTransfer: {
        step.what = sequence.transfers.size();
        Transfer transfer{};
        transfer.name = reader.text();
        transfer.channel = reader.size();
        transfer.buffer = reader.index(sequence.buffers.size(), "host buffers");
        transfer.offset = reader.size();
        transfer.token = reader.flag();
        transfer.walk = read_walk(reader);
        sequence.transfers.push_back(std::move(transfer));
        break;
      }
      case HostActionKind::kAwait:
      case HostActionKind::kFree:
        step.what = reader.index(sequence.transfers.size(), "transfers started before");
        break;
      case HostActionKind::kWrite:
        step.what = reader.size();
        step.index = reader.size();
        step.value = reader.next();
        break;
      case HostActionKind::kSet:
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

}  // namespace flownpu::emulator
