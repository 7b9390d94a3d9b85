// SPDX-License-Identifier: Apache-2.0
// Where the threads of a pool run, and what part of a job each begins with.
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
// workers, each of which is kept on cores that no other worker and, if it can be had, no caller
// runs on. Left to itself, the system wakes a worker on the core of the caller that wakes it, or on
// that core's second thread, and has it stand in the caller's way for milliseconds.
class ThreadPlaces {
 public:
  // On computing_processors(processors); with more threads than these, of all processors, each as
  // if it were a core; with more threads than processors the system decides, and shares are equal.
  ThreadPlaces(std::size_t threads, const std::vector<Processor>& processors);

  // Lets each worker run on its places and nowhere else, if the system does.
  void keep(std::span<std::thread> workers) const;
  // Gives a worker the core that the caller has left for one of the worker's. Allocates nothing.
  void make_room(std::span<std::thread> workers);

  // Where the part of `thread` begins, of [0, whole); that of the number of threads is the end.
  std::uint64_t bound(std::uint64_t whole, std::size_t thread) const {
    return whole * before_[thread].load(std::memory_order_relaxed) /
           before_.back().load(std::memory_order_relaxed);
  }

  // Whether cores differ in speed, so that their parts do: first as the system says, then by what
  // each did of the jobs before. The parts of cores that do not are equal, since one that did less
  // had been disturbed.
  bool are_uneven() const { return uneven_; }
  // What each thread did of a job, its tasks.
  void learn(std::span<const std::int64_t> done);

 private:
  int core_of(int processor) const;
  void keep(std::span<std::thread> workers, std::size_t worker) const;
  Processor& of_thread(std::size_t thread) { return thread == 0 ? caller_ : workers_[thread - 1]; }
  void weigh();

  bool uneven_ = false;
  Processor caller_;
  // Dealt out to the workers in turn; one for each where cores differ in speed.
  std::vector<Processor> workers_;
  // The core of each processor, by its number; -1: not of this process.
  std::vector<int> cores_;
  // What the threads before each have of all work; workers read it while a caller changes it.
  std::vector<std::atomic<std::uint32_t>> before_;
};

}  // namespace flownpu::cpu
