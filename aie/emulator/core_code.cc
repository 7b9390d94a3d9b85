// SPDX-License-Identifier: Apache-2.0
#include "aie/emulator/core_code.h"

#include <algorithm>
#include <string>

namespace flownpu::emulator {
namespace {

class Checker {
 public:
  Checker(const CoreRecord& core, const Array& array) : core_(core), array_(array) {}

  void check() {
    while (at_ < core_.code.size()) {
      starts_.push_back(at_);
      check_operation();
    }
    if (starts_.empty() || static_cast<Op>(core_.code[starts_.back()]) != Op::kEnd)
      refuse("does not end");
    for (const std::size_t target : targets_) {
      if (!std::binary_search(starts_.begin(), starts_.end(), target))
        refuse("goes to word " + std::to_string(target) + ", where no operation begins");
    }
  }

 private:
  void check_operation() {
    const auto number = core_.code[at_];
    if (number < 0 || number > static_cast<std::int64_t>(Op::kEnd))
      refuse("has operation " + std::to_string(number));
    const auto op = static_cast<Op>(number);
    size_ = words(op);
    if (size_ > core_.code.size() - at_) refuse("ends in an operation");
    check_operands(op);
    at_ += size_;
  }

  void check_operands(Op op) {
    switch (op) {
      case Op::kGet:
      case Op::kSet:
        return variable(1);
      case Op::kLoop:
        for (const std::size_t operand : {1, 2, 3}) variable(operand);
        return target(4);
      case Op::kNext:
        for (const std::size_t operand : {1, 2}) variable(operand);
        return target(3);
      case Op::kAcquire:
        index(2, core_.views, "view");
        return objects(3);
      case Op::kRelease:
        return objects(2);
      case Op::kCall:
        return call();
      case Op::kLoad:
        index(1, array_.memories.size(), "memory");
        return variable(2);
      case Op::kStore:
        index(1, array_.memories.size(), "memory");
        return;
      case Op::kWait:
      case Op::kAddLock:
        index(1, array_.locks.size(), "lock");
        return;
      default:
        return;  // a value, or operands on the stack: nothing to check
    }
  }

  // The operand is a number of objects, at most as many as the fifo's end (the first operand) has.
  void objects(std::size_t operand) {
    const std::size_t end = index(1, array_.ends.size(), "end of a fifo");
    index(operand, array_.ends[end].objects.size() + 1, "count of objects");
  }

  void call() {
    const std::size_t kernel = index(1, array_.kernels.size(), "kernel");
    const std::size_t count = array_.kernels[kernel].arguments.size();
    if (core_.code[at_ + 2] != static_cast<std::int64_t>(count))
      refuse("calls " + array_.kernels[kernel].entry + " with other arguments than it has");
    size_ += count * kArgumentWords;
    if (size_ > core_.code.size() - at_) refuse("ends in an operation");
    for (std::size_t place = words(Op::kCall); place < size_; place += kArgumentWords) {
      constexpr std::size_t kKinds = static_cast<std::size_t>(ArgumentKind::kView) + 1;
      const auto kind = static_cast<ArgumentKind>(index(place, kKinds, "kind of argument"));
      if (kind == ArgumentKind::kMemory) index(place + 1, array_.memories.size(), "memory");
      if (kind != ArgumentKind::kView) continue;
      index(place + 1, array_.ends.empty() ? 0 : core_.views, "view");
      index(place + 2, array_.memories.size(), "object of a view");
    }
  }

  void variable(std::size_t operand) { index(operand, core_.variables, "variable"); }
  void target(std::size_t operand) {
    targets_.push_back(index(operand, core_.code.size(), "word of the program"));
  }

  std::size_t index(std::size_t operand, std::size_t count, const char* what) {
    const std::int64_t value = core_.code[at_ + operand];
    if (value < 0 || static_cast<std::size_t>(value) >= count) {
      refuse("has at word " + std::to_string(at_ + operand) + " as a " + what + " " +
             std::to_string(value) + ", there are " + std::to_string(count));
    }
    return static_cast<std::size_t>(value);
  }

  [[noreturn]] void refuse(const std::string& why) const {
    throw Error("[emulator] the program of " + core_.name + " " + why);
  }

  const CoreRecord& core_;
  const Array& array_;
  std::size_t at_ = 0;
  std::size_t size_ = 0;              // words of the operation at at_
  std::vector<std::size_t> starts_;   // where operations begin
  std::vector<std::size_t> targets_;  // where jumps go
};

}  // namespace

std::size_t words(Op op) {
  switch (op) {
    case Op::kPush:
    case Op::kGet:
    case Op::kSet:
    case Op::kStore:
      return 2;
    case Op::kLoad:
    case Op::kWait:
    case Op::kAddLock:
    case Op::kRelease:
    case Op::kCall:
      return 3;
    case Op::kAcquire:
    case Op::kNext:
      return 4;
    case Op::kLoop:
      return 5;
    default:
      return 1;
  }
}

void check_code(const CoreRecord& core, const Array& array) { Checker(core, array).check(); }

}  // namespace flownpu::emulator
