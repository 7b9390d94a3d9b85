// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/thread_places.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

namespace flownpu::cpu {
namespace {

// Jobs with fewer tasks per thread say little about a thread's speed.
constexpr std::int64_t kLeastTasks = 4;
// A job moves a thread's speed by 1 / kMemory of the observed difference. Eight jobs of eight tasks
// per thread, as a matrix product has, measure speeds to within one or two per cent.
constexpr int kMemory = 8;

}  // namespace

ThreadPlaces::ThreadPlaces(std::size_t threads, const std::vector<Processor>& processors)
    : before_(threads + 1) {
  std::vector<Processor> all = processors;
  std::vector<Processor> places = computing_processors(all);
  if (places.size() < threads) {
    for (Processor& one : all) one.core = one.number;
    places = all;
    std::ranges::stable_sort(places, std::greater(), &Processor::capacity);
  }
  if (places.size() < threads) places.clear();
  uneven_ = !places.empty() && places.back().capacity < places.front().capacity;
  for (const Processor& one : all) {
    const auto number = static_cast<std::size_t>(one.number);
    if (cores_.size() <= number) cores_.resize(number + 1, -1);
    cores_[number] = one.core;
  }
  // The caller has its current core. If cores differ in speed, the workers get the fastest of the
  // others, one each.
  const int number = current_processor();
  const auto here = std::ranges::find(all, number, &Processor::number);
  if (here != all.end()) caller_ = *here;
  std::erase_if(places, [&](const Processor& place) { return place.core == caller_.core; });
  if (uneven_) places.resize(threads - 1);
  workers_ = std::move(places);
  weigh();
}

int ThreadPlaces::core_of(int processor) const {
  const auto number = static_cast<std::size_t>(processor);
  return processor >= 0 && number < cores_.size() ? cores_[number] : -1;
}

void ThreadPlaces::keep(std::span<std::thread> workers, std::size_t worker) const {
  if (!workers_.empty()) keep_on(workers[worker], workers_, worker, workers.size());
}

void ThreadPlaces::keep(std::span<std::thread> workers) const {
  for (std::size_t worker = 0; worker < workers.size(); ++worker) keep(workers, worker);
}

void ThreadPlaces::make_room(std::span<std::thread> workers) {
  const int core = core_of(current_processor());
  if (core == caller_.core || workers.empty()) return;
  const auto taken = std::ranges::find(workers_, core, &Processor::core);
  if (taken == workers_.end()) return;
  std::swap(*taken, caller_);
  keep(workers, static_cast<std::size_t>(taken - workers_.begin()) % workers.size());
  weigh();
}

void ThreadPlaces::weigh() {
  std::uint32_t before = 0;
  for (std::size_t thread = 0; thread < before_.size(); ++thread) {
    before_[thread].store(before, std::memory_order_relaxed);
    if (thread + 1 < before_.size())
      before += uneven_ ? static_cast<std::uint32_t>(of_thread(thread).capacity) : 1;
  }
}

// Ignores jobs in which a thread did nothing, because it had not woken up.
void ThreadPlaces::learn(std::span<const std::int64_t> done) {
  const auto threads = static_cast<std::int64_t>(done.size());
  const std::int64_t tasks = std::accumulate(done.begin(), done.end(), std::int64_t{0});
  if (tasks < kLeastTasks * threads || std::ranges::find(done, 0) != done.end()) return;
  const std::int64_t all = before_.back().load(std::memory_order_relaxed);
  for (std::size_t thread = 0; thread < done.size(); ++thread) {
    int& capacity = of_thread(thread).capacity;
    const auto seen = static_cast<int>(done[thread] * all / tasks);
    capacity = std::max(1, capacity + (seen - capacity) / kMemory);
  }
  weigh();
}

}  // namespace flownpu::cpu
