// SPDX-License-Identifier: Apache-2.0
// A hardware context: an emulated array, a queue of commands, and a thread that runs them.
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

// A command's packet as XRT writes it: a call, or a chain of calls.
struct Packet;

struct Job {
  // The first member, so destroyed last: when no job is alive, no job holds a buffer.
  std::unique_ptr<const Alive> alive = std::make_unique<const Alive>("job");
  std::uint64_t sequence = 0;
  std::shared_ptr<Buffer> command;
  std::vector<std::shared_ptr<Buffer>> chained;
  // All buffers that the command uses, as the program said.
  std::vector<std::shared_ptr<Buffer>> used;
};

class Context {
 public:
  explicit Context(Buffers& buffers);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Makes the array from the emulator's words in a buffer. Throws if they are not valid.
  void configure(Buffer& configuration);
  // The command's number; or a negative error number.
  std::int64_t submit(Job job);
  enum class Waited { kEnded, kNotInTime, kLost };
  // Waits until the command and all before it have ended.
  Waited wait(std::uint64_t sequence,
              std::optional<std::chrono::steady_clock::time_point> deadline);
  // Ends a call that hangs, and the thread as soon as its queue is empty.
  void stop();

 private:
  void work();
  void run(const Job& job, bool is_last);
  void end(const Job& job, std::uint32_t state);
  std::uint32_t run_chain(const Job& job, Packet& chain, bool is_last);
  // The state in which a single call ends.
  std::uint32_t run_call(const Job& job, Buffer& command, bool is_last);
  std::uint32_t compute(Packet& packet, bool is_last);
  // Blocks until the watchdog ends the call.
  void hang(const Job& job, std::chrono::milliseconds watchdog, bool is_lost);
  void abort_rest(std::deque<Job>& rest);

  Alive alive_{"context"};
  Buffers& buffers_;
  std::unique_ptr<flownpu::emulator::Emulator> emulator_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  std::uint64_t submitted_ = 0;
  std::uint64_t ended_ = 0;  // commands before this number have ended
  bool stopping_ = false;
  std::atomic<int> under_way_{0};
  std::int64_t taken_ = 0;  // ms of the job's calls so far, by the setting `call`
  std::thread worker_;
};

// Whether the device is gone: then every request fails with ENODEV, until the watchdog has acted.
bool is_lost();

}  // namespace xdna_driver
