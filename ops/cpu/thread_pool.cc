// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/thread_pool.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <mutex>
#include <system_error>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "ops/system/forks.h"
#include "ops/system/machine_limits.h"
#include "ops/system/processors.h"
#include "ops/system/threads.h"

namespace flownpu::cpu {
namespace {

// About 220 us of pauses on a Zen 5 (a pause takes 40-140 cycles). Together with fetching ahead,
// this spans the time between two decode steps, so that the next step need not wake workers (50
// us). It is too short for a scheduler's tick to notice.
constexpr int kSpins = 8000;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");  // Arm's yield takes no time on most of its processors
#else
  std::this_thread::yield();
#endif
}

// The most bytes that all workers together fetch ahead. They take some 270 us at 30 GB/s, about the
// time between two decode steps, and a quarter of a third-level cache of 32 MB. Between two jobs of
// a step there is time for some 256 KB, which a core's second-level cache holds.
constexpr std::size_t kFetchedBytes = 8 << 20;
constexpr std::size_t kCacheLine = 64;
// Bytes that are prefetched before a pause. A core that already tracks as many requests as it can
// drops further prefetches. With 16 lines and a pause a Zen 5 fetches 35 GB/s, and all lines are
// then in its caches. Without pauses it requested 80 GB/s, and few lines arrived.
constexpr std::size_t kFetchedAtOnce = 16 * kCacheLine;

// A share: its first task in the low half, the one after its last in the high half.
constexpr int kEndBits = 32;
constexpr std::uint64_t kBegin = std::numeric_limits<std::uint32_t>::max();
constexpr std::int64_t kMostTasks = std::numeric_limits<std::uint32_t>::max();
constexpr std::int64_t kNone = -1;

// The gate: workers inside in the low 16 bits, then the open bit, then the job's number.
constexpr std::uint64_t kOpen = std::uint64_t{1} << 16;
constexpr std::uint64_t kInside = kOpen - 1;
constexpr std::uint64_t kJob = kOpen << 1;

}  // namespace

// Prefetches a thread's shares of the expected streams, as much at a time as a core can keep track
// of.
class ThreadPool::Fetch {
 public:
  Fetch(const ThreadPool& pool, std::size_t thread)
      : pool_(pool), thread_(thread), left_(kFetchedBytes / (pool.shares_.size() - 1)) {
    take_share();
  }

  // Prefetches the next kFetchedAtOnce bytes and pauses. False if nothing was left.
  bool step() {
    if (at_ == end_) return false;
    constexpr int kSecondLevel = 2;
    for (std::size_t line = 0; line < kFetchedAtOnce; line += kCacheLine)
      __builtin_prefetch(at_ + line, 0, kSecondLevel);
    pause();
    at_ += std::min(kFetchedAtOnce, static_cast<std::size_t>(end_ - at_));
    if (at_ == end_) take_share();
    return true;
  }

 private:
  void take_share() {
    if (next_ == kMostStreams) return;
    const Stream& stream = pool_.expected_[next_++];
    const std::size_t all = stream.bytes.load(std::memory_order_relaxed);
    const std::size_t begin = pool_.places_->bound(all, thread_);
    // A caller may move the bounds between the two reads.
    const std::size_t end = std::max(begin, pool_.places_->bound(all, thread_ + 1));
    const std::size_t bytes = std::min(end - begin, left_);
    left_ -= bytes;
    at_ = stream.begin.load(std::memory_order_relaxed) + begin;
    end_ = at_ + bytes;
  }

  const ThreadPool& pool_;
  std::size_t thread_;
  std::size_t left_;
  std::size_t next_ = 0;
  const std::byte* at_ = nullptr;
  const std::byte* end_ = nullptr;
};

// Notices whether a worker takes turns on its core with a thread of other work.
//
// When the system ends such a worker's turn in the middle of a task, the caller waits for that task
// for some milliseconds, longer than a decode step's whole job. Spinning between jobs brings that
// end nearer. A worker that sleeps there instead begins a new turn when a job wakes it, and the
// system prefers it, since it used less of the core than the other work.
class ThreadPool::Turns {
 public:
  void start_job() {
    task_ = Clock::now();
    usual_ = kUnknown;
  }
  void end_task() {
    const Clock::time_point now = Clock::now();
    const Clock::duration took = now - task_;
    if (took > kTurn && took / kManyTasks > usual_) lose(took, now);
    usual_ = took;
    task_ = now;
  }
  // Whether interruptions took more time than sleeping costs, within kRemembered.
  bool are_taken() const { return Clock::now() - taken_ < kRemembered; }

 private:
  using Clock = std::chrono::steady_clock;
  // Linux gives other work at least 1.4 ms on two cores and 2.8 ms on eight (0.7 ms times one more
  // than their binary logarithm), and Windows more.
  static constexpr std::chrono::milliseconds kTurn{1};
  // A task that took this many times as long as the one before in its job is not merely a long one.
  static constexpr int kManyTasks = 4;
  static constexpr Clock::duration kUnknown = Clock::duration::max();
  // Sleeping costs a wake-up for each job: a tenth of a step of 25 ms with 120 jobs. Turns that
  // take less time than that are borne: desktops have a few of them a second. A thread that
  // computes all the time takes half of it.
  static constexpr int kBorneShare = 10;
  static constexpr std::chrono::milliseconds kBorne{10};
  // Noticing other work again after this time costs a fiftieth of it.
  static constexpr std::chrono::milliseconds kRemembered{500};

  void lose(Clock::duration took, Clock::time_point now) {
    lost_ = std::max(lost_ - (now - since_) / kBorneShare, Clock::duration{0}) + took;
    since_ = now;
    if (lost_ > kBorne) taken_ = now;
  }

  Clock::time_point task_;
  Clock::duration usual_ = kUnknown;
  Clock::time_point since_;
  Clock::duration lost_{0};
  Clock::time_point taken_ = Clock::now() - kRemembered;
};

std::shared_ptr<ThreadPool> ThreadPool::shared(int threads) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<ThreadPool>> pools;
  if (threads <= 0) threads = usable_processors();
  const std::lock_guard lock(mutex);
  std::shared_ptr<ThreadPool> pool = pools[threads].lock();
  if (!pool) pools[threads] = pool = std::make_shared<ThreadPool>(threads);
  return pool;
}

std::atomic<int> ThreadPool::computing_{0};

namespace {

// Whether this thread does tasks of a job with others. A job inside of such a task is the thread's
// own, and does not count as another thread that computes: the others would leave the outer job.
thread_local bool in_job = false;

struct InJob {
  InJob() { in_job = true; }
  ~InJob() { in_job = false; }
  InJob(const InJob&) = delete;
  InJob& operator=(const InJob&) = delete;
};

}  // namespace

ThreadPool::ThreadPool(int threads)
    : ThreadPool(threads, describe_processors(allowed_processors())) {}

ThreadPool::ThreadPool(int threads, const std::vector<Processor>& processors)
    : most_(std::max(threads, usable_processors())),
      shares_(static_cast<std::size_t>(std::max(threads, 1))),
      done_(shares_.size()) {
  static std::once_flag once;
  std::call_once(once, [] { in_forked_children([] { computing_ = 0; }); });
  start(processors);
}

ThreadPool::~ThreadPool() {
  if (started_ != forks()) {
    forget();
    return;
  }
  stopping_ = true;
  ++jobs_;
  wake_all(jobs_);
  for (std::thread& worker : *workers_) worker.join();
}

void ThreadPool::start(const std::vector<Processor>& processors) {
  started_ = forks();
  places_ = std::make_unique<ThreadPlaces>(shares_.size(), processors);
  workers_ = std::make_unique<std::vector<std::thread>>();
  workers_->reserve(shares_.size() - 1);
  try {
    for (std::size_t thread = 1; thread < shares_.size(); ++thread)
      workers_->emplace_back([this, thread] { work(thread); });
  } catch (const std::system_error&) {
    // The system allows no more threads (ulimit -u, or a container's limit). The existing threads
    // also do the shares of the missing ones.
    most_ = std::min(most_, static_cast<int>(workers_->size()) + 1);
  }
  places_->keep(*workers_);
}

// In a forked child: gives up the parent's workers. Their handles cannot be joined or destroyed: a
// call with such a handle would reach another thread, or the calling one.
void ThreadPool::forget() {
  [[maybe_unused]] const auto* never_freed = workers_.release();
  gate_ = 0;
  sleeping_ = 0;
}

// Makes the calling thread the caller of the pool's job. False if another thread is.
bool ThreadPool::enter() {
  const std::int64_t process = forks();
  std::int64_t caller = caller_.load(std::memory_order_relaxed);
  if (caller == process) return false;
  if (!caller_.compare_exchange_strong(caller, process, std::memory_order_acquire)) return false;
  if (started_ != process) {
    forget();
    start(describe_processors(allowed_processors()));
  }
  return true;
}

void ThreadPool::run_erased(std::int64_t tasks, Call call, const void* context) {
  if (in_job) {
    for (std::int64_t index = 0; index < tasks; ++index) call(context, index, 0);
    return;
  }
  const int others = computing_.fetch_add(1, std::memory_order_relaxed);
  if (tasks <= 1 || tasks > kMostTasks || shares_.size() == 1 || others + 1 >= most_ || !enter()) {
    for (std::int64_t index = 0; index < tasks; ++index) call(context, index, 0);
    computing_.fetch_sub(1, std::memory_order_relaxed);
    return;
  }
  call_ = call;
  context_ = context;
  deal(tasks);
  if (LentThreads* lent = LentThreads::current(); lent != nullptr) {
    run_lent(*lent);
    caller_.store(kNobody, std::memory_order_release);
    computing_.fetch_sub(1, std::memory_order_relaxed);
    return;
  }
  places_->make_room(*workers_);
  gate_.fetch_add(kJob | kOpen, std::memory_order_release);
  // A worker counts itself before it compares the jobs, so that either it or the caller sees the
  // other.
  jobs_.fetch_add(1);
  if (sleeping_.load() != 0) wake_all(jobs_);
  {
    const InJob job;
    for (std::int64_t index = claim(0); index != kNone; index = claim(0)) {
      call(context, index, 0);
      ++shares_[0].done;
    }
  }
  gate_.fetch_and(~kOpen, std::memory_order_acq_rel);
  Fetch fetch(*this, 0);
  for (int spin = 0; (gate_.load(std::memory_order_acquire) & kInside) != 0; ++spin) {
    if (spin >= kSpins) {
      std::this_thread::yield();
    } else if (!fetch.step()) {
      pause();
    }
  }
  if (places_->are_uneven()) learn();
  caller_.store(kNobody, std::memory_order_release);
  computing_.fetch_sub(1, std::memory_order_relaxed);
}

// Each call does a thread's share and what is left of others, so all is done even if the threads
// come one after the other.
void ThreadPool::run_lent(LentThreads& threads) {
  threads.run(
      shares_.size(),
      [](void* self, std::size_t thread) {
        auto& pool = *static_cast<ThreadPool*>(self);
        const InJob job;
        for (std::int64_t index = pool.claim(thread); index != kNone; index = pool.claim(thread))
          pool.call_(pool.context_, index, thread);
      },
      this);
}

void ThreadPool::learn() {
  for (std::size_t thread = 0; thread < shares_.size(); ++thread)
    done_[thread] = shares_[thread].done;
  places_->learn(done_);
}

void ThreadPool::deal(std::int64_t tasks) {
  const auto all = static_cast<std::uint64_t>(tasks);
  for (std::size_t thread = 0; thread < shares_.size(); ++thread) {
    const std::uint64_t range =
        places_->bound(all, thread + 1) << kEndBits | places_->bound(all, thread);
    shares_[thread].range.store(range, std::memory_order_relaxed);
    shares_[thread].done = 0;
  }
}

// The next task of the thread's share, or the last one of another's; kNone if there is none left.
std::int64_t ThreadPool::claim(std::size_t thread) {
  for (std::size_t i = 0; i < shares_.size(); ++i) {
    std::atomic<std::uint64_t>& share = shares_[(thread + i) % shares_.size()].range;
    std::uint64_t range = share.load(std::memory_order_relaxed);
    while ((range & kBegin) < range >> kEndBits) {
      const std::uint64_t less = i == 0 ? range + 1 : range - (std::uint64_t{1} << kEndBits);
      if (share.compare_exchange_weak(range, less, std::memory_order_relaxed))
        return static_cast<std::int64_t>(i == 0 ? range & kBegin : less >> kEndBits);
    }
  }
  return kNone;
}

// A worker's part of the job.
void ThreadPool::drain(std::size_t thread, Turns& turns) {
  const InJob job;
  turns.start_job();
  while (computing_.load(std::memory_order_relaxed) <= most_) {
    const std::int64_t index = claim(thread);
    if (index == kNone) return;
    call_(context_, index, thread);
    ++shares_[thread].done;
    turns.end_task();
  }
}

bool ThreadPool::join() {
  std::uint64_t gate = gate_.load(std::memory_order_acquire);
  while ((gate & kOpen) != 0 && computing_.load(std::memory_order_relaxed) < most_) {
    if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) {
      computing_.fetch_add(1, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

// The counter precedes the gate, so that a caller whose workers have left does not count them with
// its next job.
void ThreadPool::leave() {
  computing_.fetch_sub(1, std::memory_order_relaxed);
  gate_.fetch_sub(1, std::memory_order_release);
}

void ThreadPool::work(std::size_t thread) {
  std::uint32_t seen = 0;
  Turns turns;
  while (!stopping_) {
    if (join()) {
      drain(thread, turns);
      leave();
    }
    if (!turns.are_taken()) {
      Fetch fetch(*this, thread);
      while (jobs_.load(std::memory_order_relaxed) == seen && fetch.step()) {
      }
      // If all cores compute, a spinning worker would take one from them.
      for (int spin = 0; spin < kSpins && jobs_.load(std::memory_order_acquire) == seen &&
                         computing_.load(std::memory_order_relaxed) < most_;
           ++spin)
        pause();
    }
    sleeping_.fetch_add(1);
    wait_while(jobs_, seen);
    sleeping_.fetch_sub(1);
    seen = jobs_.load(std::memory_order_acquire);
  }
}

}  // namespace flownpu::cpu
