// SPDX-License-Identifier: Apache-2.0
// A persistent pool for steps of a few microseconds: workers spin briefly for the next step before
// they sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace flownpu::cpu {

class ThreadPool {
 public:
  // The pool of `threads` threads (the caller's included) of this process; 0: one for each core
  // that the process may run on. Sessions with the same number share a pool, so that two of them do
  // not use more threads than cores.
  static std::shared_ptr<ThreadPool> shared(int threads);

  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls task(index) for every index in [0, tasks), in any order, on all threads, and returns when
  // all are done. If another caller has the pool, the calling thread does all of them alone. A task
  // must not throw.
  template <typename Task>
  void run(std::int64_t tasks, const Task& task) {
    run_erased(
        tasks,
        [](const void* context, std::int64_t index) {
          (*static_cast<const Task*>(context))(index);
        },
        &task);
  }

 private:
  using Call = void (*)(const void* context, std::int64_t index);

  void run_erased(std::int64_t tasks, Call call, const void* context);
  void work();
  bool join();
  void drain();

  std::mutex caller_;
  std::vector<std::thread> workers_;

  // The job. Written by the caller while the gate is shut and nobody is inside, read by workers
  // that came in.
  Call call_ = nullptr;
  const void* context_ = nullptr;
  std::int64_t tasks_ = 0;

  // Each on a cache line of its own. The gate holds the job's number, whether it is open, and how
  // many workers are inside: a caller waits for those inside only, never for a worker that the
  // system has not woken yet.
  alignas(64) std::atomic<std::uint64_t> gate_{0};
  alignas(64) std::atomic<std::int64_t> next_{0};
  // Counts jobs; what idle workers sleep on.
  alignas(64) std::atomic<std::uint32_t> jobs_{0};
  std::atomic<bool> stopping_{false};
};

}  // namespace flownpu::cpu
