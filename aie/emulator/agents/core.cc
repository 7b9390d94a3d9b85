// SPDX-License-Identifier: Apache-2.0
#include "aie/emulator/agents/core.h"

#include <algorithm>

#include "aie/emulator/core_code.h"

namespace flownpu::emulator {
namespace {

std::int64_t floor_divide(std::int64_t left, std::int64_t right) {
  const std::int64_t quotient = left / right;
  return quotient - static_cast<std::int64_t>(left % right != 0 && (left < 0) != (right < 0));
}

}  // namespace

Core::Core(const CoreRecord& record, const Array& array, std::vector<std::unique_ptr<Lock>>& locks,
           Memories& memories, std::vector<Kernel>& kernels, Scheduler& scheduler)
    : record_(&record),
      array_(&array),
      locks_(&locks),
      memories_(&memories),
      kernels_(&kernels),
      scheduler_(&scheduler),
      variables_(record.variables),
      ends_(array.ends.size()),
      views_(record.views) {
  while (at_ < record.code.size()) {
    const Op op = this->op();
    if (op == Op::kRelease) (*locks_)[array.ends[number(1)].gives]->given_by(*this);
    if (op == Op::kAddLock) (*locks_)[number(1)]->given_by(*this);
    waits_for_barrier_ = waits_for_barrier_ || op == Op::kWait;
    at_ += words(op) + (op == Op::kCall ? kArgumentWords * number(2) : 0);
  }
  at_ = 0;
}

bool Core::step() {
  do {
    if (ended_ || !run_one()) return false;
  } while (!scheduler_->seeded());
  return true;
}

std::int64_t Core::pop() {
  if (stack_.empty()) throw Error("[emulator] " + name() + " takes a number that is not there");
  const std::int64_t value = stack_.back();
  stack_.pop_back();
  return value;
}

// Runs operations up to and including one that other agents can see. Returns false if it waits for
// that one.
bool Core::run_one() {
  for (;;) {
    const Op op = this->op();
    switch (op) {
      case Op::kPush:
        stack_.push_back(word(1));
        break;
      case Op::kGet:
        stack_.push_back(variables_[number(1)]);
        break;
      case Op::kSet:
        variables_[number(1)] = pop();
        break;
      case Op::kLoop: {
        const std::int64_t index = variables_[number(1)];
        const std::int64_t stop = variables_[number(2)];
        if (variables_[number(3)] > 0 ? index >= stop : index <= stop) {
          at_ = number(4);
          continue;
        }
        break;
      }
      case Op::kNext:
        variables_[number(1)] += variables_[number(2)];
        at_ = number(3);
        continue;
      case Op::kAcquire:
        if (!acquire()) return false;
        at_ += words(op);
        return true;
      case Op::kRelease:
        release();
        at_ += words(op);
        return true;
      case Op::kCall:
        call();
        return true;
      case Op::kLoad:
        variables_[number(2)] = memories_->load(number(1), pop());
        at_ += words(op);
        return true;
      case Op::kStore: {
        const std::int64_t value = pop();
        memories_->store(number(1), pop(), value);
        at_ += words(op);
        return true;
      }
      case Op::kWait:
        if (!(*locks_)[number(1)]->is(word(2), *this)) return false;
        at_ += words(op);
        return true;
      case Op::kAddLock:
        (*locks_)[number(1)]->add(word(2));
        at_ += words(op);
        return true;
      case Op::kEnd:
        ended_ = !record_->forever;
        at_ = 0;
        return true;
      default:
        calculate(op);
    }
    at_ += words(op);
  }
}

void Core::calculate(Op op) {
  const std::int64_t right = pop();
  const std::int64_t left = pop();
  if ((op == Op::kFloorDivide || op == Op::kRemainder) && right == 0) {
    throw Error("[emulator] " + name() + " divides by 0");
  }
  switch (op) {
    case Op::kAdd:
      stack_.push_back(left + right);
      break;
    case Op::kSubtract:
      stack_.push_back(left - right);
      break;
    case Op::kMultiply:
      stack_.push_back(left * right);
      break;
    case Op::kFloorDivide:
      stack_.push_back(floor_divide(left, right));
      break;
    default:
      stack_.push_back(left % right);
  }
}

bool Core::acquire() {
  const EndRecord& record = array_->ends[number(1)];
  End& end = ends_[number(1)];
  const std::size_t count = number(3);
  if (count > end.held) {
    const auto missing = static_cast<std::int64_t>(count - end.held);
    if (!(*locks_)[record.takes]->take(missing, *this)) return false;
    end.held = count;
  }
  views_[number(2)] = {number(1), end.oldest};
  return true;
}

void Core::release() {
  const EndRecord& record = array_->ends[number(1)];
  End& end = ends_[number(1)];
  const std::size_t count = number(2);
  if (count > end.held) {
    throw Error("[emulator] " + name() + " releases " + std::to_string(count) + " objects of the " +
                record.name + " and holds " + std::to_string(end.held));
  }
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t memory = record.objects[end.oldest];
    if (record.consumes) Memories::forget(memories_->data(memory), memories_->bytes(memory));
    end.oldest = (end.oldest + 1) % record.objects.size();
  }
  end.held -= count;
  (*locks_)[record.gives]->add(static_cast<std::int64_t>(count));
}

aie_host::Argument Core::memory_argument(std::size_t memory) const {
  return {memories_->data(memory), memories_->bytes(memory), 0};
}

void Core::call() {
  Kernel& kernel = (*kernels_)[number(1)];
  const std::size_t count = number(2);
  arguments_.resize(count);
  argument_memories_.clear();
  for (std::size_t i = count; i-- > 0;) {  // numbers lie on the stack, the last on top
    const std::size_t place = 3 + i * kArgumentWords;
    switch (static_cast<ArgumentKind>(word(place))) {
      case ArgumentKind::kInteger:
        arguments_[i] = {nullptr, 0, static_cast<std::int32_t>(pop())};
        break;
      case ArgumentKind::kMemory:
        argument_memories_.push_back(number(place + 1));
        arguments_[i] = memory_argument(argument_memories_.back());
        break;
      case ArgumentKind::kView: {
        const View& view = views_[number(place + 1)];
        const auto& objects = array_->ends[view.end].objects;
        argument_memories_.push_back(objects[(view.first + number(place + 2)) % objects.size()]);
        arguments_[i] = memory_argument(argument_memories_.back());
      }
    }
  }
  try {
    kernel.call(arguments_);
  } catch (const Error& error) {
    throw Error("[emulator] " + name() + ", " + kernel.record->entry + ": " + error.what());
  }
  ++kernel.calls;
  for (const std::size_t memory : argument_memories_) {
    memories_->check_red_zone(memory, kernel.record->entry + " on " + name());
  }
  at_ += words(Op::kCall) + count * kArgumentWords;
}

Wait Core::wait() const {
  if (ended_) return {};
  const Op op = this->op();
  if (op == Op::kAcquire) {
    const EndRecord& record = array_->ends[number(1)];
    const Lock& lock = *(*locks_)[record.takes];
    const auto missing = static_cast<std::int64_t>(number(3) - ends_[number(1)].held);
    return {std::to_string(missing) + " of the " + lock.name() + " (" +
                std::to_string(lock.value()) + " there)",
            lock.givers()};
  }
  const Lock& lock = *(*locks_)[number(1)];
  return {lock.name() + " to be " + std::to_string(word(2)) + " (it is " +
              std::to_string(lock.value()) + ")",
          lock.givers()};
}

std::string Core::leftover() const {
  for (std::size_t i = 0; i < ends_.size(); ++i) {
    if (ends_[i].held > 0 && array_->ends[i].consumes) {
      return name() + " still holds " + std::to_string(ends_[i].held) + " objects of the " +
             array_->ends[i].name;
    }
  }
  if (ended_ || !waits_for_barrier_ || op() == Op::kWait) return "";
  return name() + " is in the middle of its program and waits for " + wait().what;
}

}  // namespace flownpu::emulator
