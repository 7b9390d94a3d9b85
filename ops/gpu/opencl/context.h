// SPDX-License-Identifier: Apache-2.0
// A device that is in use: its queue, buffers in its memory, kernels, and counts of commands and
// bytes.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "ops/gpu/opencl/devices.h"
#include "ops/gpu/opencl/loader.h"
#include "ops/gpu/opencl/program_cache.h"
#include "ops/gpu/opencl/progress.h"

namespace flownpu::gpu {

// Bytes that a context has allocated and not freed; its buffers may outlive it.
using LiveBytes = std::shared_ptr<std::atomic<std::int64_t>>;

// Memory of a device; freed with its owner.
class Buffer {
 public:
  Buffer() = default;
  // `live`: the counter that has its bytes while it lives; null for images, and for the host's
  // memory.
  Buffer(cl::Memory handle, std::size_t bytes, LiveBytes live);
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer();

  cl::Memory handle() const { return handle_; }
  std::size_t bytes() const { return bytes_; }

 private:
  void swap(Buffer& other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(bytes_, other.bytes_);
    std::swap(live_, other.live_);
  }

  cl::Memory handle_ = nullptr;
  std::size_t bytes_ = 0;
  LiveBytes live_;
};

// A kernel, compiled for one device.
class CompiledKernel {
 public:
  CompiledKernel(std::string name, cl::Program program, cl::Kernel kernel)
      : name_(std::move(name)), program_(program), kernel_(kernel) {}
  CompiledKernel(const CompiledKernel&) = delete;
  CompiledKernel& operator=(const CompiledKernel&) = delete;
  ~CompiledKernel();

  const std::string& name() const { return name_; }
  cl::Kernel handle() const { return kernel_; }

 private:
  std::string name_;
  cl::Program program_;
  cl::Kernel kernel_;
};

// How many work-groups there are, and how many work-items ("lanes") each has.
struct Grid {
  std::array<std::int64_t, 3> groups{1, 1, 1};
  std::int64_t lanes = 1;
};

class Twins;  // twins.h

using KernelArgument = std::variant<const Buffer*, std::int32_t, float>;

// The duration of a kernel, by the device's clock, and its beginning, by the host's
// (std::chrono::steady_clock).
struct KernelTime {
  std::string kernel;
  double seconds;
  std::int64_t begin_ns;
};

// Counts since the context was opened. `compiled`, `from_cache`: kernels.
struct Counts {
  std::int64_t dispatches = 0;
  std::int64_t allocations = 0;
  std::int64_t bytes_to_device = 0;
  std::int64_t bytes_to_host = 0;
  std::int64_t compiled = 0;
  std::int64_t from_cache = 0;
};

// One in-order queue. A thread that uses it holds its mutex. All members throw OpenClError. If
// commands do not end within the time limit (progress.h), the device is given up: calls after that
// fail at once.
class Context {
 public:
  // Throws Error, too, where time_limit() does (progress.h).
  explicit Context(FoundDevice device, std::filesystem::path cache_folder = default_cache_folder());
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context();

  const DeviceFacts& facts() const { return device_.facts; }
  const ProgramCache& cache() const { return cache_; }
  ProgramCache& cache() { return cache_; }
  // The text of all properties of device, driver and build options that affect a compiled kernel or
  // its time.
  std::string identity() const;
  const Counts& counts() const { return counts_; }
  // Throws OpenClError in a process that was forked since: a thread that the child lacks may hold
  // the mutex.
  std::mutex& mutex() {
    check_opencl_is_own();
    return mutex_;
  }
  // The device's copies of a session's memory.
  Twins& twins() { return *twins_; }
  // Whether a command failed or the device was given up; a new context may work again.
  bool failed() const { return failed_; }

  // A buffer with undefined content; it has at least 1 byte.
  Buffer allocate(std::size_t bytes);
  // A buffer of the host's memory, which kernels read in place; `owner` lives as long as they may
  // read.
  Buffer use(std::span<const std::byte> memory, std::shared_ptr<const void> owner);
  // An image of a buffer's bytes, in texels of four uint32, which kernels may read instead of the
  // buffer; it keeps the memory alive. DeviceFacts::can_be_image says which sizes it takes.
  Buffer image_of(const Buffer& buffer);
  // Bytes of all buffers of allocate() that have not been freed.
  std::int64_t live_bytes() const { return *live_; }
  // write() and read() return when the bytes have been moved; copy() is a command of the queue, and
  // does not wait. Offsets are in bytes.
  void write(const Buffer& buffer, std::span<const std::byte> from, std::size_t offset = 0);
  void read(const Buffer& buffer, std::span<std::byte> to, std::size_t offset = 0);
  void copy(const Buffer& from, std::size_t from_offset, const Buffer& to, std::size_t to_offset,
            std::size_t bytes);

  // The kernel `name` of a source: from this process's memory, from disk, or newly compiled.
  std::shared_ptr<const CompiledKernel> compile(const std::string& name, const std::string& source);
  // Enqueues the kernel, and does not wait for it. Nothing is launched where the grid has no
  // groups.
  void launch(const CompiledKernel& kernel, std::span<const KernelArgument> arguments,
              const Grid& grid);
  // Waits for all commands. Throws OpenClError if one failed, or did not end in time.
  void wait();
  // Whether kernels' times are taken, which costs an event for each; true at first.
  bool takes_times() const { return takes_times_; }
  void set_takes_times(bool takes) { takes_times_ = takes; }
  // The times of the kernels that were launched since the last call; waits for them.
  std::vector<KernelTime> take_times();

 private:
  // The commands between two marks (progress.h).
  struct CommandRange {
    std::string_view first;
    std::string_view last;
    std::int64_t commands = 0;
  };
  struct Mark {
    cl::Event event;
    CommandRange before;
  };

  // Throws as status.h's check does, and remembers that the device failed.
  void check(cl::Int code, std::string_view call, const std::string& what,
             const std::string& details = "");
  void check_not_given_up() const;
  void enqueued(std::string_view kernel);
  void mark();
  [[noreturn]] void give_up(const Mark& missed);
  cl::Program load(const std::string& key);
  cl::Program build(const std::string& name, const std::string& source);
  void keep(cl::Program program, const std::string& key);
  std::string build_log(cl::Program program) const;
  void collect();
  static std::string text_of(const CommandRange& range);

  struct Launched {
    std::string kernel;
    cl::Event event;
    std::int64_t enqueued_ns;  // by the host's clock, when the call had returned
  };

  FoundDevice device_;
  ProgramCache cache_;
  cl::Context context_ = nullptr;
  cl::Queue queue_ = nullptr;
  std::map<std::string, std::shared_ptr<const CompiledKernel>> kernels_;  // by name and source
  bool takes_times_ = true;
  LiveBytes live_ = std::make_shared<std::atomic<std::int64_t>>(0);
  std::vector<Launched> launched_;
  std::vector<KernelTime> times_;
  Counts counts_;
  std::chrono::milliseconds limit_;
  CommandRange since_mark_;
  std::vector<Mark> marks_;  // not waited for yet
  std::vector<std::shared_ptr<const void>> owners_;
  bool failed_ = false;
  bool given_up_ = false;
  std::unique_ptr<Twins> twins_;
  std::mutex mutex_;
};

}  // namespace flownpu::gpu
