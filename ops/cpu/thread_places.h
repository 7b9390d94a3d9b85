// SPDX-License-Identifier: Apache-2.0
// The places where the threads of a pool run, and the part of a job that each begins with.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <thread>
#include <vector>

#include "ops/system/processors.h"

namespace flownpu::cpu {

// Threads are numbered; thread 0 is a caller, which runs where the system puts it. The others are
// workers. Each worker has cores that no other worker and, if possible, no caller uses. Without
// this, the system wakes a worker on its caller's core or on that core's second thread, where it
// takes time from the caller for milliseconds.
class ThreadPlaces {
 public:
  // The places are computing_processors(processors). If there are more threads than these, all
  // processors are places, as if each were a core. If there are more threads than processors, the
  // system places the threads, and shares are equal.
  ThreadPlaces(std::size_t threads, const std::vector<Processor>& processors);

  // Lets each worker run on its places and nowhere else, if the system allows it.
  void keep(std::span<std::thread> workers) const;
  // If the caller has moved to a worker's core, gives that worker the core that the caller left.
  // Allocates nothing.
  void make_room(std::span<std::thread> workers);

  // The first index of `thread`'s part of [0, whole). For thread = the number of threads, it is
  // `whole`.
  std::uint64_t bound(std::uint64_t whole, std::size_t thread) const {
    return whole * before_[thread].load(std::memory_order_relaxed) /
           before_.back().load(std::memory_order_relaxed);
  }

  // Whether cores differ in speed, and so in their parts of a job. Speeds are first those that the
  // system reports, then those of earlier jobs. Cores of equal speed always get equal parts,
  // because a core that did less was only disturbed.
  bool are_uneven() const { return uneven_; }
  // Updates the threads' speeds from each thread's number of tasks in a job.
  void learn(std::span<const std::int64_t> done);

 private:
  int core_of(int processor) const;
  void keep(std::span<std::thread> workers, std::size_t worker) const;
  Processor& of_thread(std::size_t thread) { return thread == 0 ? caller_ : workers_[thread - 1]; }
  void weigh();

  bool uneven_ = false;
  Processor caller_;
  // Places, dealt out to the workers in turn. If cores differ in speed, each worker has one place.
  std::vector<Processor> workers_;
  // The core of each processor, by its number; -1: the process may not run there.
  std::vector<int> cores_;
  // For each thread, the sum of the weights of earlier threads. Workers read it while a caller
  // changes it.
  std::vector<std::atomic<std::uint32_t>> before_;
};

}  // namespace flownpu::cpu
