// SPDX-License-Identifier: Apache-2.0
#include "tests/npu/xdna_driver/context.h"

#include <xrt/detail/ert.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <exception>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "tests/npu/xdna_driver/packet_fields.h"

namespace xdna_driver {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Where the arguments of aiecc's kernels are in a packet, in bytes after the mask of units.
constexpr std::size_t kOpcode = 0x00;
constexpr std::size_t kInstructions = 0x08;
constexpr std::size_t kCount = 0x10;
constexpr std::size_t kFirstBuffer = 0x14;
constexpr std::uint64_t kRunInstructions = 3;
// How often a hung command looks whether the watchdog has ended it.
constexpr milliseconds kTick{1};

std::atomic<int> lost{0};

}  // namespace

bool is_lost() { return lost != 0; }

struct Packet : ert_start_kernel_cmd {
  template <typename Value>
  Value argument(std::size_t offset) const {
    // `count` is in words and includes the mask.
    if (offset + sizeof(Value) > (count - 1) * sizeof(std::uint32_t)) {
      throw std::runtime_error("a command has no argument at byte " + std::to_string(offset));
    }
    return read_at<Value>(data, offset);
  }
};

namespace {

Packet& packet_of(Buffer& command) { return *reinterpret_cast<Packet*>(command.host()); }

// Written last, because a program that sees the new state may free the command and its buffers.
void set_state(Packet& packet, std::uint32_t state) {
  std::atomic_thread_fence(std::memory_order_release);
  packet.state = state & 0xFU;
}

}  // namespace

Context::Context(Buffers& buffers) : buffers_(buffers), worker_([this] { work(); }) {}

Context::~Context() {
  if (under_way_ != 0) violate("a context was destroyed in which a call is under way");
  stop();
}

void Context::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (worker_.joinable()) worker_.join();
}

void Context::configure(Buffer& configuration) {
  const std::span<std::byte> bytes = configuration.on_device();
  std::uint64_t size = 0;
  std::memcpy(&size, bytes.data(), std::min(sizeof(size), bytes.size()));
  if (size % sizeof(std::int64_t) != 0 || size + sizeof(size) > bytes.size()) {
    throw std::runtime_error("a configuration that is none of the double's");
  }
  std::vector<std::int64_t> words(size / sizeof(std::int64_t));
  std::memcpy(words.data(), bytes.data() + sizeof(size), size);
  emulator_ = make_emulator(words);
}

std::int64_t Context::submit(Job job) {
  const std::lock_guard lock(mutex_);
  if (emulator_ == nullptr) return -EINVAL;
  for (const auto& buffer : job.used) ++buffer->users();
  ++under_way_;
  job.sequence = submitted_++;
  jobs_.push_back(std::move(job));
  changed_.notify_all();
  return static_cast<std::int64_t>(submitted_ - 1);
}

Context::Waited Context::wait(std::uint64_t sequence,
                              std::optional<steady_clock::time_point> deadline) {
  std::unique_lock lock(mutex_);
  while (ended_ <= sequence) {
    if (is_lost()) return Waited::kLost;
    if (deadline && steady_clock::now() >= *deadline) return Waited::kNotInTime;
    if (deadline) {
      changed_.wait_until(lock, *deadline);
    } else {
      changed_.wait(lock);
    }
  }
  return Waited::kEnded;
}

void Context::end(const Job& job, std::uint32_t state) {
  // First the counts of users: a program that polls the state may then free the buffers.
  for (const auto& buffer : job.used) --buffer->users();
  --under_way_;
  set_state(packet_of(*job.command), state);
}

void Context::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    const Job job = std::move(jobs_.front());
    jobs_.pop_front();
    const bool is_last = jobs_.empty();
    lock.unlock();
    run(job, is_last);
    lock.lock();
    ended_ = job.sequence + 1;
    changed_.notify_all();
  }
}

void Context::run(const Job& job, bool is_last) {
  Packet& packet = packet_of(*job.command);
  taken_ = 0;
  const std::uint32_t state = packet.opcode == ERT_CMD_CHAIN ? run_chain(job, packet, is_last)
                                                             : run_call(job, *job.command, is_last);
  end(job, state);
  if (state != ERT_CMD_STATE_TIMEOUT) return;
  // The watchdog restarts the context, which ends all commands that wait in it.
  std::deque<Job> rest;
  {
    const std::lock_guard lock(mutex_);
    rest.swap(jobs_);
  }
  abort_rest(rest);
}

void Context::abort_rest(std::deque<Job>& rest) {
  for (const Job& job : rest) end(job, ERT_CMD_STATE_ABORT);
  if (rest.empty()) return;
  const std::lock_guard lock(mutex_);
  ended_ = rest.back().sequence + 1;
  changed_.notify_all();
}

std::uint32_t Context::run_chain(const Job& job, Packet& chain, bool is_last) {
  auto* const data = get_ert_cmd_chain_data(reinterpret_cast<ert_packet*>(&chain));
  for (std::uint32_t i = 0; i < job.chained.size(); ++i) {
    Buffer& command = *job.chained[i];
    const std::uint32_t state = run_call(job, command, is_last && i + 1 == job.chained.size());
    if (state == ERT_CMD_STATE_COMPLETED) continue;
    write_at(data, offsetof(ert_cmd_chain_data, error_index), i);
    // Only the chain's state says how a call failed, unless the call timed out; XRT passes the
    // state on.
    if (state == ERT_CMD_STATE_TIMEOUT) set_state(packet_of(command), state);
    return state;
  }
  return ERT_CMD_STATE_COMPLETED;
}

std::uint32_t Context::run_call(const Job& job, Buffer& command, bool is_last) {
  if (const auto microseconds = struck("delay")) {
    std::this_thread::sleep_for(std::chrono::microseconds(*microseconds));
  }
  const auto watchdog = struck("hang");
  const bool goes = struck("lost").has_value();
  if (watchdog || goes) {
    hang(job, milliseconds(watchdog.value_or(-1)), goes);
    return ERT_CMD_STATE_TIMEOUT;
  }
  if (const auto state = struck("error")) return static_cast<std::uint32_t>(*state);
  taken_ += setting("call", 0);
  if (taken_ > setting("watchdog", std::numeric_limits<std::int64_t>::max())) {
    return ERT_CMD_STATE_TIMEOUT;
  }
  return compute(packet_of(command), is_last);
}

void Context::hang(const Job& job, milliseconds watchdog, bool goes) {
  for (const auto& buffer : job.used) ++buffer->hanging();
  if (goes) {
    ++lost;
    changed_.notify_all();
  }
  const int rounds = watchdog_rounds();
  const auto since = steady_clock::now();
  std::unique_lock lock(mutex_);
  while (!stopping_ && watchdog_rounds() == rounds &&
         (watchdog.count() < 0 || steady_clock::now() - since < watchdog)) {
    changed_.wait_for(lock, kTick);
  }
  if (goes) --lost;
  for (const auto& buffer : job.used) --buffer->hanging();
}

std::uint32_t Context::compute(Packet& packet, bool is_last) {
  try {
    if (packet.argument<std::uint64_t>(kOpcode) != kRunInstructions) {
      throw std::runtime_error("a command's opcode is not that of instructions");
    }
    const std::optional<Place> words = buffers_.at(packet.argument<std::uint64_t>(kInstructions));
    const std::size_t size = packet.argument<std::uint32_t>(kCount) * sizeof(std::uint32_t);
    if (!words || words->buffer->type() != BufferType::kDevice || words->offset != 0 ||
        size != words->buffer->size()) {
      throw std::runtime_error("a command's instructions are not all of a buffer of the heap");
    }
    const auto sequence = read_instructions(words->buffer->on_device());
    std::vector<std::shared_ptr<Buffer>> alive;
    std::vector<std::span<std::byte>> buffers;
    for (const auto& record : sequence.buffers) {
      const std::size_t number = buffers.size();
      const auto place = buffers_.at(
          packet.argument<std::uint64_t>(kFirstBuffer + number * sizeof(std::uint64_t)));
      if (!place || place->buffer->type() != BufferType::kShare ||
          record.bytes > place->buffer->size() - place->offset) {
        throw std::runtime_error("buffer " + record.name + " is not in the host's memory");
      }
      alive.push_back(place->buffer);
      buffers.push_back(place->buffer->on_device().subspan(place->offset, record.bytes));
    }
    // The array settles before the host's next call, unless that call is queued already.
    emulator_->run(sequence, buffers, {.seed = 0, .settle = is_last});
    return ERT_CMD_STATE_COMPLETED;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "[xdna_driver] %s\n", error.what());  // a driver's is in dmesg
    return ERT_CMD_STATE_ERROR;
  }
}

}  // namespace xdna_driver
