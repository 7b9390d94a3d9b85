// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/thread_pool.h"

#include <map>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace flownpu::cpu {
namespace {

// About 50 us of pauses (a pause takes 40-140 cycles): longer than the serial work between two
// steps of a decode step, shorter than what a scheduler's tick would notice.
constexpr int kSpins = 2000;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// The gate: workers inside in the low 16 bits, then the open bit, then the job's number.
constexpr std::uint64_t kOpen = std::uint64_t{1} << 16;
constexpr std::uint64_t kInside = kOpen - 1;
constexpr std::uint64_t kJob = kOpen << 1;

int available_cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
#endif
  const unsigned cores = std::thread::hardware_concurrency();
  return cores > 0 ? static_cast<int>(cores) : 1;
}

}  // namespace

std::shared_ptr<ThreadPool> ThreadPool::shared(int threads) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<ThreadPool>> pools;
  if (threads <= 0) threads = available_cores();
  const std::lock_guard lock(mutex);
  std::shared_ptr<ThreadPool> pool = pools[threads].lock();
  if (!pool) pools[threads] = pool = std::make_shared<ThreadPool>(threads);
  return pool;
}

ThreadPool::ThreadPool(int threads) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
}

ThreadPool::~ThreadPool() {
  stopping_ = true;
  ++jobs_;
  jobs_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run_erased(std::int64_t tasks, Call call, const void* context) {
  std::unique_lock lock(caller_, std::defer_lock);
  if (tasks <= 1 || workers_.empty() || !lock.try_lock()) {
    for (std::int64_t index = 0; index < tasks; ++index) call(context, index);
    return;
  }
  call_ = call;
  context_ = context;
  tasks_ = tasks;
  next_.store(0, std::memory_order_relaxed);
  gate_.fetch_add(kJob | kOpen, std::memory_order_release);
  jobs_.fetch_add(1, std::memory_order_release);
  jobs_.notify_all();
  drain();
  gate_.fetch_and(~kOpen, std::memory_order_acq_rel);
  for (int spin = 0; (gate_.load(std::memory_order_acquire) & kInside) != 0; ++spin) {
    if (spin < kSpins) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

void ThreadPool::drain() {
  for (std::int64_t index = next_.fetch_add(1); index < tasks_; index = next_.fetch_add(1)) {
    call_(context_, index);
  }
}

bool ThreadPool::join() {
  std::uint64_t gate = gate_.load(std::memory_order_acquire);
  while ((gate & kOpen) != 0) {
    if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) return true;
  }
  return false;
}

void ThreadPool::work() {
  std::uint32_t seen = 0;
  while (!stopping_) {
    if (join()) {
      drain();
      gate_.fetch_sub(1, std::memory_order_release);
    }
    for (int spin = 0; spin < kSpins && jobs_.load(std::memory_order_acquire) == seen; ++spin)
      pause();
    jobs_.wait(seen, std::memory_order_acquire);
    seen = jobs_.load(std::memory_order_acquire);
  }
}

}  // namespace flownpu::cpu
