// SPDX-License-Identifier: Apache-2.0
// A device that is in use: its queue, buffers in its memory, kernels, and counts of commands and
// bytes. Everything above it is the same for all APIs; each API is a folder beside this one, with a
// class derived from Context.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "ops/gpu/context/facts.h"
#include "ops/gpu/context/failure.h"
#include "ops/gpu/context/program_cache.h"
#include "ops/gpu/language/dialect.h"

namespace flownpu::gpu {

// Bytes that a context has allocated and not freed; its buffers may outlive it.
using LiveBytes = std::shared_ptr<std::atomic<std::int64_t>>;

// Memory of a device; freed with its owner.
class Buffer {
 public:
  // The API's handle, and the function that frees it.
  using Handle = std::unique_ptr<void, void (*)(void*)>;

  Buffer() = default;
  // `live`: the counter that has its bytes while it lives; null for images, and for the host's
  // memory.
  Buffer(Handle handle, std::size_t bytes, LiveBytes live)
      : handle_(std::move(handle)), bytes_(bytes), live_(std::move(live)) {
    if (live_ != nullptr) *live_ += static_cast<std::int64_t>(bytes_);
  }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer() {
    if (live_ != nullptr) *live_ -= static_cast<std::int64_t>(bytes_);
  }

  void* handle() const { return handle_.get(); }
  std::size_t bytes() const { return bytes_; }

 private:
  void swap(Buffer& other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(bytes_, other.bytes_);
    std::swap(live_, other.live_);
  }

  Handle handle_{nullptr, nullptr};
  std::size_t bytes_ = 0;
  LiveBytes live_;
};

// A kernel, compiled for one device.
class CompiledKernel {
 public:
  // `writes`: for each buffer among its arguments whether it writes it, or reads it.
  CompiledKernel(std::string name, std::vector<bool> writes)
      : name_(std::move(name)), writes_(std::move(writes)) {}
  CompiledKernel(const CompiledKernel&) = delete;
  CompiledKernel& operator=(const CompiledKernel&) = delete;
  virtual ~CompiledKernel() = default;

  const std::string& name() const { return name_; }
  bool writes(std::size_t argument) const { return writes_[argument]; }

 private:
  std::string name_;
  std::vector<bool> writes_;
};

// How many work-groups there are, and how many work-items ("lanes") each has.
struct Grid {
  std::array<std::int64_t, 3> groups{1, 1, 1};
  std::int64_t lanes = 1;
};

class Twins;  // twins.h

// Buffers come first.
using KernelArgument = std::variant<const Buffer*, std::int32_t>;

// The duration of a kernel, by the device's clock, and its beginning, by the host's
// (std::chrono::steady_clock).
struct KernelTime {
  std::string kernel;
  double seconds;
  std::int64_t begin_ns;
};

// Counts since the context was opened. `compiled`, `from_cache`: kernels. `submissions`: lists of
// commands that the device was given, `recordings`: those of them that were not submitted before
// with other arguments, `barriers`: commands that wait for those before them. OpenCL's queue has no
// lists, and all its commands wait.
struct Counts {
  std::int64_t dispatches = 0;
  std::int64_t submissions = 0;
  std::int64_t recordings = 0;
  std::int64_t barriers = 0;
  std::int64_t allocations = 0;
  std::int64_t bytes_to_device = 0;
  std::int64_t bytes_to_host = 0;
  std::int64_t compiled = 0;
  std::int64_t from_cache = 0;
};

// One in-order queue. A thread that uses it holds its mutex. All members throw GpuError. If
// commands do not end within the time limit (time_limit.h), the device is given up: calls after
// that fail at once.
class Context {
 public:
  // Throws Error, too, where time_limit() does (time_limit.h).
  Context(DeviceFacts facts, std::filesystem::path cache_folder);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  virtual ~Context();

  // The API's name: "OpenCL".
  virtual const char* api() const = 0;
  // The language of the sources that compile() takes.
  virtual const Dialect& dialect() const = 0;
  // The text of all properties of device, driver and build options that affect a compiled kernel or
  // its time.
  virtual std::string identity() const = 0;

  const DeviceFacts& facts() const { return facts_; }
  const ProgramCache& cache() const { return cache_; }
  ProgramCache& cache() { return cache_; }
  const Counts& counts() const { return counts_; }
  // Throws GpuError in a process that was forked since: a thread that the child lacks may hold the
  // mutex.
  std::mutex& mutex() {
    check_own();
    return mutex_;
  }
  // The device's copies of a session's memory.
  Twins& twins() { return *twins_; }
  // Whether a command failed or the device was given up; a new context may work again.
  bool failed() const { return failed_; }

  // A buffer with undefined content; it has at least 1 byte.
  virtual Buffer allocate(std::size_t bytes) = 0;
  // A buffer of the host's memory, which kernels read in place, if facts() say that they can;
  // `owner` lives as long as they may read. Without a handle if the driver refuses this memory.
  virtual Buffer use(std::span<const std::byte> memory, std::shared_ptr<const void> owner) = 0;
  // An image of a buffer's bytes, in texels of four uint32, which kernels may read instead of the
  // buffer; it keeps the memory alive. DeviceFacts::can_be_image says which sizes it takes.
  virtual Buffer image_of(const Buffer& buffer) = 0;
  // Bytes of all buffers of allocate() that have not been freed.
  std::int64_t live_bytes() const { return *live_; }
  // write() and read() return when the bytes have been moved; copy() is a command of the queue, and
  // does not wait. Offsets are in bytes.
  virtual void write(const Buffer& buffer, std::span<const std::byte> from, std::size_t offset) = 0;
  virtual void read(const Buffer& buffer, std::span<std::byte> to, std::size_t offset) = 0;
  void write(const Buffer& buffer, std::span<const std::byte> from) { write(buffer, from, 0); }
  void read(const Buffer& buffer, std::span<std::byte> to) { read(buffer, to, 0); }
  virtual void copy(const Buffer& from, std::size_t from_offset, const Buffer& to,
                    std::size_t to_offset, std::size_t bytes) = 0;

  // The kernel: from this process's memory, from disk, or newly compiled. `activation`: as
  // generate() takes it.
  std::shared_ptr<const CompiledKernel> compile(const KernelDescription& kernel,
                                                Element activation = Element::kFloat32);
  // Enqueues the kernel, and does not wait for it. Nothing is launched where the grid has no
  // groups.
  virtual void launch(const CompiledKernel& kernel, std::span<const KernelArgument> arguments,
                      const Grid& grid) = 0;
  // Waits for all commands. Throws GpuError if one failed, or did not end in time.
  virtual void wait() = 0;
  // Whether kernels' times are taken, which costs an event for each; true at first.
  bool takes_times() const { return takes_times_; }
  void set_takes_times(bool takes) { takes_times_ = takes; }
  // The times of the kernels that were launched since the last call; waits for them.
  virtual std::vector<KernelTime> take_times() = 0;

 protected:
  // The kernel, by way of the cache on disk; `key`: what it is kept under there.
  virtual std::shared_ptr<const CompiledKernel> compile_source(const KernelDescription& kernel,
                                                               const std::string& source,
                                                               const std::string& key,
                                                               std::vector<bool> writes) = 0;
  virtual void check_own() const = 0;
  // Throws GpuError for work-groups that the device does not take.
  void check_lanes(const CompiledKernel& kernel, const Grid& grid) const;
  void check_not_given_up() const;
  // Throws GpuError for these commands, which did not end within the limit.
  [[noreturn]] void give_up(const std::string& commands);
  // The part of a message that describes a buffer for which there is no memory.
  std::string describe_allocation(std::size_t bytes) const;

  DeviceFacts facts_;
  ProgramCache cache_;
  std::map<std::string, std::shared_ptr<const CompiledKernel>> kernels_;  // by name and source
  Counts counts_;
  LiveBytes live_ = std::make_shared<std::atomic<std::int64_t>>(0);
  std::chrono::milliseconds limit_;
  bool takes_times_ = true;
  bool failed_ = false;
  bool given_up_ = false;

 private:
  std::unique_ptr<Twins> twins_;
  std::mutex mutex_;
};

}  // namespace flownpu::gpu
