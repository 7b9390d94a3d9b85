// SPDX-License-Identifier: Apache-2.0
// A core: runs the code of a compute tile.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "aie/emulator/agents/agent.h"
#include "aie/emulator/memories.h"
#include "aie/host/kernel_table.h"

namespace flownpu::emulator {

// Runs a kernel on these arguments; throws Error where the kernel traps.
using KernelCall = std::function<void(std::span<const aie_host::Argument>)>;

struct Kernel {
  const KernelRecord* record;
  KernelCall call;
  std::uint64_t calls = 0;
};

class Core final : public Agent {
 public:
  Core(const CoreRecord& record, const Array& array, std::vector<std::unique_ptr<Lock>>& locks,
       Memories& memories, std::vector<Kernel>& kernels, Scheduler& scheduler);

  bool step() override;
  [[nodiscard]] std::string name() const override { return record_->name; }
  [[nodiscard]] Wait wait() const override;
  // A text about objects that it holds or waits for when nothing can run any more; empty if it is
  // where a call would start it again.
  [[nodiscard]] std::string leftover() const;

 private:
  // A fifo's end: the oldest of the objects it holds, and how many these are.
  struct End {
    std::size_t oldest = 0;
    std::size_t held = 0;
  };

  bool run_one();
  void calculate(Op op);
  bool acquire();
  void release();
  void call();
  [[nodiscard]] std::int64_t word(std::size_t i) const { return record_->code[at_ + i]; }
  [[nodiscard]] std::size_t number(std::size_t i) const {
    return static_cast<std::size_t>(word(i));
  }
  [[nodiscard]] Op op() const { return static_cast<Op>(record_->code[at_]); }
  std::int64_t pop();
  [[nodiscard]] aie_host::Argument memory_argument(std::size_t memory) const;

  const CoreRecord* record_;
  const Array* array_;
  std::vector<std::unique_ptr<Lock>>* locks_;
  Memories* memories_;
  std::vector<Kernel>* kernels_;
  Scheduler* scheduler_;
  bool waits_for_barrier_ = false;
  bool ended_ = false;
  std::size_t at_ = 0;
  std::vector<std::int64_t> variables_;
  std::vector<std::int64_t> stack_;
  std::vector<End> ends_;
  struct View {
    std::size_t end;
    std::size_t first;
  };
  std::vector<View> views_;
  std::vector<aie_host::Argument> arguments_;
  std::vector<std::size_t> argument_memories_;
};

}  // namespace flownpu::emulator
