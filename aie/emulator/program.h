// SPDX-License-Identifier: Apache-2.0
// The program of the emulator: an array and its sequences in flat form, as aie/emulator/flatten.py
// writes them and `read_array` and `read_sequence` read them. Distances are bytes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "aie/emulator/walk.h"
#include "aie/words/reader.h"

namespace flownpu::emulator {

using words::Error;
using words::read_words;
using words::WordKind;
using words::WordReader;

// Memory of a tile: an object of a fifo, or a buffer. `parameters`: it holds run-time parameters,
// of which a core may only load words that were written.
struct Memory {
  std::string name;
  std::size_t bytes;
  bool parameters;
  std::vector<std::byte> initial;
};

struct LockRecord {
  std::string name;
  std::int64_t initial;
};

// One descriptor: take 1 from lock `takes`, walk over bytes offset .. offset + bytes of a memory,
// add 1 to lock `gives`. The first `gives_back` of these bytes hold nothing then.
struct Descriptor {
  std::size_t memory;
  std::size_t offset;
  std::size_t bytes;
  std::size_t takes;
  std::size_t gives;
  std::size_t gives_back;
  Walk walk;
};

// A DMA channel at the source or at a sink of a stream; one without descriptors is a shim tile's,
// to which the sequence gives tasks.
struct ChannelRecord {
  std::string name;
  std::size_t stream;
  bool source;
  std::vector<Descriptor> descriptors;
};

// A kernel, and the bytes of its buffer arguments; 0: the argument is a number.
struct KernelRecord {
  std::string entry;
  std::vector<std::size_t> arguments;
};

// A core's end of a fifo: acquiring an object takes 1 from lock `takes`, releasing it adds 1 to
// lock `gives`. `objects`: the memories of its objects.
struct EndRecord {
  std::string name;
  std::size_t takes;
  std::size_t gives;
  bool consumes;
  std::vector<std::size_t> objects;
};

// A core's code. Numbers are taken from a stack and put there; words that follow an operation are
// in brackets.
enum class Op : std::int64_t {
  kPush,  // [value]
  kGet,   // [variable]
  kSet,   // [variable]
  kAdd,   // the right operand is on top
  kSubtract,
  kMultiply,
  kFloorDivide,
  kRemainder,  // with the sign of the left operand, as the compiler has it
  kLoop,       // [index, stop, step, exit]: goes to `exit` once the variable is past its stop
  kNext,       // [index, step, top]: adds the step, goes to `top`
  kAcquire,    // [end, view, count]: holds `count` objects in all
  kRelease,    // [end, count]
  kCall,       // [kernel, number of arguments, and for each: kind, memory or view, index]
  kLoad,       // [memory, variable]: the index is on the stack
  kStore,      // [memory]: the value is on top, the index below
  kWait,       // [lock, value]
  kAddLock,    // [lock, value]
  kEnd,
};
enum class ArgumentKind : std::int64_t { kInteger, kMemory, kView };

struct CoreRecord {
  std::string name;
  bool forever;
  std::size_t variables;
  std::size_t views;
  std::vector<std::int64_t> code;
};

struct Array {
  std::int64_t identity;
  std::string target;
  std::size_t task_queue;  // tasks that a shim channel holds, the running one among them
  std::vector<Memory> memories;
  std::vector<LockRecord> locks;
  std::size_t streams;
  std::vector<KernelRecord> kernels;
  std::vector<ChannelRecord> channels;
  std::vector<EndRecord> ends;
  std::vector<CoreRecord> cores;
};

enum class HostActionKind : std::int64_t { kTransfer, kAwait, kFree, kWrite, kSet };

// `what` is a transfer's number (kTransfer, kAwait, kFree), a memory (kWrite, with index and value)
// or a lock (kSet, with value).
struct HostAction {
  HostActionKind kind;
  std::size_t what;
  std::size_t index;
  std::int64_t value;
};

struct Transfer {
  std::string name;
  std::size_t channel;
  std::size_t buffer;
  std::size_t offset;
  bool token;
  Walk walk;
};

struct HostBuffer {
  std::string name;
  std::size_t bytes;
};

struct Sequence {
  std::int64_t identity;  // its array's
  std::string name;
  std::vector<HostBuffer> buffers;
  std::vector<Transfer> transfers;
  std::vector<HostAction> steps;
};

// Read what aie/emulator/flatten.py writes, in words as aie/words/writer.py describes them. Throw
// Error if it is something else, of another version, or refers to what is not there.
Array read_array(std::span<const std::int64_t> words);
Sequence read_sequence(std::span<const std::int64_t> words);

}  // namespace flownpu::emulator
