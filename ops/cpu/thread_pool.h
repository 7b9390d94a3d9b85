// SPDX-License-Identifier: Apache-2.0
// A persistent pool for steps of a few microseconds: workers spin briefly for the next step before
// they sleep.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <thread>
#include <type_traits>
#include <vector>

#include "ops/cpu/thread_places.h"
#include "ops/lent_threads.h"
#include "ops/system/processors.h"

namespace flownpu::cpu {

class ThreadPool {
 public:
  // The process's pool of `threads` threads, the caller's included; 0: one thread for each usable
  // core within the quota (usable_processors). Sessions with the same number share a pool, so that
  // two of them do not use more threads than cores.
  static std::shared_ptr<ThreadPool> shared(int threads);

  explicit ThreadPool(int threads);
  // The same, on these processors.
  ThreadPool(int threads, const std::vector<Processor>& processors);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(shares_.size()); }

  // Calls task(index), or task(index, thread), for every index in [0, tasks) on all threads, and
  // returns when all are done. `thread` is below threads(); tasks of a call that run at the same
  // time get different ones. A task must not throw.
  //
  // A thread's share is a run of consecutive indices, which it takes in order. So a kernel that
  // prefetches past the end of a task fetches its thread's next data. A thread that is done with
  // its share takes tasks from the ends of the other shares. Shares are equal unless cores differ
  // in speed (ThreadPlaces).
  //
  // Concurrent callers, of one pool or of several, do not use more threads than there are cores:
  // workers help while a core is free for them, and leave after their current task when another
  // caller needs it. A caller that finds no free core, or whose pool is helping another caller,
  // does all tasks alone.
  //
  // In a run that was lent threads (ops/lent_threads.h), these do the tasks instead of the workers:
  // as many at a time as the pool has threads.
  //
  // A process that was forked has none of its parent's workers: the first call there starts new
  // ones.
  template <typename Task>
  void run(std::int64_t tasks, const Task& task) {
    run_erased(
        tasks,
        [](const void* context, std::int64_t index, std::size_t thread) {
          const Task& task = *static_cast<const Task*>(context);
          if constexpr (std::is_invocable_v<const Task&, std::int64_t, std::size_t>) {
            task(index, thread);
          } else {
            task(index);
          }
        },
        &task);
  }

  // Announces what coming jobs will read: `streams`, one after the other, each from beginning to
  // end in the order of its tasks; only the first kMostStreams count. A thread that is done with a
  // job prefetches its shares of the streams into its caches. A worker also does so after the job,
  // while the caller works alone. This is a hint: nothing depends on the contents of that memory,
  // which may even be freed meanwhile.
  static constexpr std::size_t kMostStreams = 16;
  void expect(std::span<const std::span<const std::byte>> streams) {
    for (std::size_t i = 0; i < kMostStreams; ++i) {
      const bool given = i < streams.size();
      expected_[i].begin.store(given ? streams[i].data() : nullptr, std::memory_order_relaxed);
      expected_[i].bytes.store(given ? streams[i].size() : 0, std::memory_order_relaxed);
      if (!given) break;
    }
  }

  // Calls task(row) for every row in [0, rows) as run() does, but gives each thread runs of
  // neighbouring rows, because a core fetches neighbouring memory ahead. Runs of 16 rows (of a few
  // KB each) instead of single rows made whole prompts 4 % faster, because activations are rounded
  // faster. Few rows are dealt out in four runs a thread; `least` rows are not divided.
  template <typename Task>
  void run_rows(std::int64_t rows, const Task& task, std::int64_t least = 1) {
    constexpr std::int64_t kMostRows = 16;
    const std::int64_t runs = std::int64_t{4} * threads();
    const std::int64_t each = std::max(least, std::clamp<std::int64_t>(rows / runs, 1, kMostRows));
    run((rows + each - 1) / each, [&](std::int64_t index) {
      const std::int64_t end = std::min(rows, (index + 1) * each);
      for (std::int64_t row = index * each; row < end; ++row) task(row);
    });
  }

 private:
  class Fetch;
  class Turns;
  using Call = void (*)(const void* context, std::int64_t index, std::size_t thread);

  // Threads of the process that compute, callers and workers of all pools. A worker of this pool
  // may join while there are fewer than `most_`.
  static std::atomic<int> computing_;

  bool enter();
  void start(const std::vector<Processor>& processors);
  void forget();
  void run_erased(std::int64_t tasks, Call call, const void* context);
  void run_lent(LentThreads& threads);
  void work(std::size_t thread);
  bool join();
  void leave();
  void deal(std::int64_t tasks);
  std::int64_t claim(std::size_t thread);
  void drain(std::size_t thread, Turns& turns);
  void learn();

  int most_;
  // The caller of the current job: kNobody, or the number of forks (ops/system/forks.h) of the
  // caller's process. In a forked child, a caller of the parent counts as nobody.
  static constexpr std::int64_t kNobody = -1;
  std::atomic<std::int64_t> caller_{kNobody};
  // These belong to the caller: the number of forks of the process that started the workers, the
  // workers, and their places.
  std::uint32_t started_ = 0;
  std::unique_ptr<std::vector<std::thread>> workers_;
  std::unique_ptr<ThreadPlaces> places_;

  // A thread's share of the job: [begin, end), begin in the low half, end in the high one. On a
  // cache line of its own.
  struct alignas(64) Share {
    std::atomic<std::uint64_t> range{0};
    // Tasks that the thread has done, from any share.
    std::int64_t done = 0;
  };

  // The job. Written by the caller while the gate is shut and nobody is inside, read by workers
  // that came in. Share 0 is the caller's.
  Call call_ = nullptr;
  const void* context_ = nullptr;
  std::vector<Share> shares_;
  std::vector<std::int64_t> done_;

  // Written by a caller while workers may read. A worker that reads half of a change prefetches
  // memory that nobody needs, which does no harm.
  struct Stream {
    std::atomic<const std::byte*> begin{nullptr};
    std::atomic<std::size_t> bytes{0};
  };
  std::array<Stream, kMostStreams> expected_;

  // Each on a cache line of its own. The gate holds the job's number, whether it is open, and how
  // many workers are inside: a caller waits only for workers inside, never for one that the system
  // has not woken yet.
  alignas(64) std::atomic<std::uint64_t> gate_{0};
  // Counts jobs; idle workers sleep on it.
  alignas(64) std::atomic<std::uint32_t> jobs_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stopping_{false};
};

}  // namespace flownpu::cpu
