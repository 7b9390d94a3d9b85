// SPDX-License-Identifier: Apache-2.0
// flownpu_testing.ThreadPool: the CPU device's pool, with tasks that record their thread.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "ops/cpu/thread_pool.h"
#include "tests/ops/bindings.h"

namespace nb = nanobind;

namespace {

using flownpu::cpu::ThreadPool;

// The tasks that each thread did, in order; the caller's list is first, if it did any.
class Record {
 public:
  void add(std::int64_t index) {
    const std::scoped_lock lock(mutex_);
    done_[std::this_thread::get_id()].push_back(index);
  }

  std::vector<std::vector<std::int64_t>> take() {
    std::vector<std::vector<std::int64_t>> lists;
    if (const auto own = done_.extract(std::this_thread::get_id())) lists.push_back(own.mapped());
    for (const auto& [thread, list] : done_) lists.push_back(list);
    return lists;
  }

 private:
  std::mutex mutex_;
  std::map<std::thread::id, std::vector<std::int64_t>> done_;
};

// A pool on given processors: (number, core, capacity) of each.
void make(ThreadPool* pool, int threads, const std::vector<std::array<int, 3>>& processors) {
  std::vector<flownpu::Processor> all;
  for (const auto& [number, core, capacity] : processors)
    all.push_back({number, core, 0, capacity});
  new (pool) ThreadPool(threads, all);
}

// Runs tasks, of which number `slow` takes `milliseconds`; returns each thread's tasks.
std::vector<std::vector<std::int64_t>> run(ThreadPool& pool, std::int64_t tasks, std::int64_t slow,
                                           int milliseconds) {
  const nb::gil_scoped_release released;
  Record record;
  pool.run(tasks, [&](std::int64_t index) {
    record.add(index);
    if (index == slow) std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
  });
  return record.take();
}

std::vector<std::vector<std::int64_t>> run_rows(ThreadPool& pool, std::int64_t rows) {
  const nb::gil_scoped_release released;
  Record record;
  pool.run_rows(rows, [&](std::int64_t row) { record.add(row); });
  return record.take();
}

// The seconds that `jobs` take, each of one task per thread, which takes `microseconds`.
double seconds_of_jobs(ThreadPool& pool, int jobs, int microseconds) {
  using Clock = std::chrono::steady_clock;
  const nb::gil_scoped_release released;
  const auto started = Clock::now();
  for (int job = 0; job < jobs; ++job) {
    pool.run(pool.threads(), [&](std::int64_t /*index*/) {
      const auto end = Clock::now() + std::chrono::microseconds(microseconds);
      while (Clock::now() < end) {
      }
    });
  }
  return std::chrono::duration<double>(Clock::now() - started).count();
}

// Whether two tasks of a job are inside of jobs of their own at the same time.
bool inner_jobs_meet(ThreadPool& pool) {
  using Clock = std::chrono::steady_clock;
  const nb::gil_scoped_release released;
  const auto end = Clock::now() + std::chrono::seconds(5);
  std::atomic<int> inside{0};
  pool.run(2, [&](std::int64_t /*index*/) {
    pool.run(2, [&](std::int64_t index) {
      if (index != 0) return;
      ++inside;
      while (inside < 2 && Clock::now() < end) std::this_thread::yield();
    });
  });
  return Clock::now() < end;
}

using Bytes = nb::ndarray<std::uint8_t, nb::c_contig>;

void expect(ThreadPool& pool, const std::vector<Bytes>& arrays) {
  std::vector<std::span<const std::byte>> streams;
  for (const Bytes& bytes : arrays)
    streams.emplace_back(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size());
  pool.expect(streams);
}

}  // namespace

void bind_thread_pool(nb::module_& module) {
  nb::class_<ThreadPool>(module, "ThreadPool")
      .def(nb::init<int>(), nb::arg("threads"))
      .def("__init__", make, nb::arg("threads"), nb::arg("processors"))
      .def_prop_ro("threads", &ThreadPool::threads)
      .def("run", run, nb::arg("tasks"), nb::arg("slow") = -1, nb::arg("milliseconds") = 0)
      .def("run_rows", run_rows, nb::arg("rows"))
      .def("seconds_of_jobs", seconds_of_jobs, nb::arg("jobs"), nb::arg("microseconds"))
      .def("inner_jobs_meet", inner_jobs_meet)
      .def("expect", expect, nb::arg("streams"));
}
