// SPDX-License-Identifier: Apache-2.0
// A hardware context: an array of the emulator's, a queue of commands, and a thread that runs them.
// A command is a packet in a buffer that both sides map (XRT's detail/ert.h): the driver writes
// into it how it ended, before it wakes those that wait.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "tests/npu/xdna_driver/buffers.h"
#include "tests/npu/xdna_driver/emulated_array.h"
#include "tests/npu/xdna_driver/state.h"

namespace xdna_driver {

// A packet of XRT's, and those that it chains.
struct Packet;

struct Job {
  // The last to go: what the job holds of buffers is gone when no job is alive.
  std::unique_ptr<const Alive> alive = std::make_unique<const Alive>("job");
  std::uint64_t sequence = 0;
  std::shared_ptr<Buffer> command;
  std::vector<std::shared_ptr<Buffer>> chained;
  // All that the program said it uses.
  std::vector<std::shared_ptr<Buffer>> used;
};

class Context {
 public:
  explicit Context(Buffers& buffers);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Takes the emulator's words from a buffer. Throws what the emulator says of them.
  void configure(Buffer& configuration);
  // The command's number; or a negative error number.
  std::int64_t submit(Job job);
  enum class Waited { kEnded, kNotInTime, kLost };
  // Until the command has ended, or all up to it.
  Waited wait(std::uint64_t sequence,
              std::optional<std::chrono::steady_clock::time_point> deadline);
  // Ends what hangs, and lets nothing begin any more.
  void stop();

 private:
  void work();
  void run(const Job& job, bool is_last);
  void end(const Job& job, std::uint32_t state);
  std::uint32_t run_chain(const Job& job, Packet& chain, bool is_last);
  // The state in which a single call ends.
  std::uint32_t run_call(const Job& job, Buffer& command, bool is_last);
  std::uint32_t compute(Packet& packet, bool is_last);
  // Until the watchdog ends it.
  void hang(const Job& job, std::chrono::milliseconds watchdog, bool is_lost);
  void abort_rest(std::deque<Job>& rest);

  Alive alive_{"context"};
  Buffers& buffers_;
  std::unique_ptr<flownpu::emulator::Emulator> emulator_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  std::uint64_t submitted_ = 0;
  std::uint64_t ended_ = 0;  // all before this number
  bool stopping_ = false;
  std::atomic<int> under_way_{0};
  std::thread worker_;
};

// Whether the device is gone: every request fails with ENODEV then, until the watchdog has come.
bool is_lost();

}  // namespace xdna_driver
