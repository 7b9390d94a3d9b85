// SPDX-License-Identifier: Apache-2.0
// Runs an array's program element by element: DMA channels that walk, streams with back-pressure,
// locks, cores that call the kernels of aie/kernels/ as compiled for this machine, and the
// sequences of one call after the other, in a legal order of events that a seed chooses. Time is
// not modelled.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "aie/emulator/agents/channel.h"
#include "aie/emulator/agents/core.h"
#include "aie/emulator/agents/sequence_agent.h"

namespace flownpu::emulator {

// Nothing can run and the sequence has not ended. The message says which agent waits for which.
struct Deadlock : Error {
  using Error::Error;
};

struct RunOptions {
  std::uint64_t seed = 0;  // 0: agents run in turn; others: small steps in an order of their own
  // Whether `run` returns only when nothing can run any more, as if the host's next call came late.
  bool settle = true;
  // The name of a core or a channel that, under a seed, runs only if nothing else can.
  std::string_view last = {};
};

struct Counts {
  // Words of 32 bits that each channel moved.
  std::map<std::string, std::uint64_t> words;
  // How often each kernel was called.
  std::map<std::string, std::uint64_t> calls;
};

// A source of kernels. Throws Error if there is no kernel of that name and with
// those parameters.
using FindKernel = std::function<KernelCall(const KernelRecord&)>;
// `table` must outlive what is returned.
FindKernel kernels_of(const aie_host::KernelTable& table);
// The table of a shared library, which stays loaded. Throws Error if it cannot be loaded or has no
// table.
const aie_host::KernelTable& load_kernels(const std::filesystem::path& path);

class Emulator {
 public:
  Emulator(Array array, const FindKernel& find_kernel);

  // Runs one call. `buffers`: the sequence's host buffers, in its order, each of its size. The next
  // call finds the array as this one leaves it, as without a reconfiguration. Throws Error
  // (Deadlock, if nothing can run) if the program goes wrong; the emulator cannot be used after
  // that.
  void run(const Sequence& sequence, std::span<const std::span<std::byte>> buffers,
           const RunOptions& options);

  [[nodiscard]] Counts counts() const;
  void reset_counts();
  // Errors of calls that have ended: data that is still under way, objects that no core took, cores
  // in the middle of a pass. One text for each.
  [[nodiscard]] std::vector<std::string> leftovers() const;

 private:
  void check(const Sequence& sequence, std::span<const std::span<std::byte>> buffers) const;
  const Agent* find(std::string_view name) const;

  Array array_;
  Memories memories_;
  Scheduler scheduler_;
  std::vector<std::unique_ptr<Lock>> locks_;
  std::vector<Stream> streams_;
  std::vector<Kernel> kernels_;
  std::vector<std::unique_ptr<Channel>> channels_;
  std::vector<std::unique_ptr<Core>> cores_;
  std::unique_ptr<SequenceAgent> sequence_;
  bool failed_ = false;
};

// The message of a deadlock; who waits for whom is followed from `start`, the sequence.
std::string describe_deadlock(const Agent& start);

}  // namespace flownpu::emulator
