// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/opencl/context.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <type_traits>

#include "ops/cancellation.h"
#include "ops/gpu/opencl/loader.h"
#include "ops/gpu/opencl/status.h"

namespace flownpu::gpu {
namespace {

// OpenCL C 3.0 on devices with dot products of integers, which compilers declare from 2.0 on only;
// else 1.2. Without -cl-fast-relaxed-math, so that NaN stays NaN and sums keep their order.
const char* build_options(const DeviceFacts& facts) {
  const bool has_3 = facts.version.starts_with("OpenCL 3");
  return facts.has_integer_dot && has_3 ? "-cl-std=CL3.0" : "-cl-std=CL1.2";
}

// The most events that are kept before their times are read, so that a long run does not hold more.
constexpr std::size_t kMostEvents = 4096;
// The most times that are kept if nobody takes them.
constexpr std::size_t kMostTimes = 1U << 16;
// Characters of a compiler's log, which may be long.
constexpr std::size_t kShownLog = 2000;

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void release(void* handle) {
  if (!opencl_is_parents()) opencl().clReleaseMemObject(static_cast<cl::Memory>(handle));
}

Buffer::Handle owned(cl::Memory handle) { return {handle, release}; }

cl::Memory handle_of(const Buffer& buffer) { return static_cast<cl::Memory>(buffer.handle()); }

// Keeps memory that an abandoned device may still use until the process ends.
void leave_to_process(std::vector<std::shared_ptr<const void>> owners) {
  static std::mutex mutex;
  // Never destroyed: the driver's threads may outlive static objects.
  static auto* const kept = new std::vector<std::shared_ptr<const void>>();
  const std::lock_guard lock(mutex);
  std::ranges::move(owners, std::back_inserter(*kept));
}

}  // namespace

class OpenClContext::Kernel final : public CompiledKernel {
 public:
  Kernel(std::string name, std::vector<bool> writes, cl::Program program, cl::Kernel kernel)
      : CompiledKernel(std::move(name), std::move(writes)), program_(program), kernel_(kernel) {}
  ~Kernel() override {
    if (opencl_is_parents()) return;
    opencl().clReleaseKernel(kernel_);
    opencl().clReleaseProgram(program_);
  }
  cl::Kernel handle() const { return kernel_; }

 private:
  cl::Program program_;
  cl::Kernel kernel_;
};

OpenClContext::OpenClContext(FoundDevice device, std::filesystem::path cache_folder)
    : Context(std::move(device.facts), std::move(cache_folder)),
      platform_(device.platform),
      id_(device.id) {
  const std::string what = "opening " + facts().title();
  const std::array<std::intptr_t, 3> properties{cl::kContextPlatform,
                                                reinterpret_cast<std::intptr_t>(platform_), 0};
  cl::Int code = 0;
  context_ = opencl().clCreateContext(properties.data(), 1, &id_, nullptr, nullptr, &code);
  check(code, "clCreateContext", what);
  queue_ = opencl().clCreateCommandQueue(context_, id_, cl::kProfiling, &code);
  if (code != 0) opencl().clReleaseContext(context_);
  check(code, "clCreateCommandQueue", what);
}

OpenClContext::~OpenClContext() {
  if (opencl_is_parents()) return;
  const Cancellable never(nullptr);
  try {
    wait();
  } catch (const GpuError&) {
    given_up_ = true;  // The error was thrown before, or nobody waits for the commands' result.
  }
  if (!marks_.empty() || since_mark_.commands > 0) leave_to_process(std::move(owners_));
  for (const Mark& one : marks_) opencl().clReleaseEvent(one.event);
  for (const Launched& one : launched_) opencl().clReleaseEvent(one.event);
  kernels_.clear();
  opencl().clReleaseCommandQueue(queue_);
  opencl().clReleaseContext(context_);
}

void OpenClContext::check_own() const { check_opencl_is_own(); }

void OpenClContext::check(cl::Int code, std::string_view call, const std::string& what,
                          const std::string& details) {
  if (code == 0) return;
  try {
    gpu::check(code, call, what, details);
  } catch (const GpuError& error) {
    failed_ = failed_ || error.failure() == Failure::kCommand;
    throw;
  }
}

std::string OpenClContext::text_of(const CommandRange& range) {
  std::string first(range.first);
  if (range.commands == 1) return first;
  return "one of the " + std::to_string(range.commands) + " commands from " + first + " to " +
         std::string(range.last);
}

void OpenClContext::enqueued(std::string_view kernel) {
  if (since_mark_.commands++ == 0) since_mark_.first = kernel;
  since_mark_.last = kernel;
  if (since_mark_.commands >= kCommandsOfMark) mark();
}

void OpenClContext::mark() {
  cl::Event event = nullptr;
  check(opencl().clEnqueueMarkerWithWaitList(queue_, 0, nullptr, &event),
        "clEnqueueMarkerWithWaitList", text_of(since_mark_));
  marks_.push_back({event, std::exchange(since_mark_, {})});
}

void OpenClContext::wait() {
  check_not_given_up();
  if (since_mark_.commands > 0) mark();
  if (marks_.empty()) return;
  check(opencl().clFlush(queue_), "clFlush", text_of(marks_.back().before));
  cl::Int error = cl::kComplete;
  for (const Mark& one : marks_) {
    check_cancelled();  // commands in the queue go on; the next wait is for them, too
    const std::optional<cl::Int> ended = end_of(one.event, limit_);
    if (!ended) give_up(text_of(one.before));
    if (error == cl::kComplete) error = *ended;
  }
  const std::string what = "one of the commands up to " + std::string(marks_.back().before.last);
  for (const Mark& one : marks_) opencl().clReleaseEvent(one.event);
  marks_.clear();
  check(error, "its execution", what);
}

Buffer OpenClContext::allocate(std::size_t bytes) {
  const std::size_t size = std::max<std::size_t>(bytes, 1);
  const std::string what = describe_allocation(size);
  cl::Int code = 0;
  cl::Memory handle = opencl().clCreateBuffer(context_, cl::kReadWrite, size, nullptr, &code);
  check(code, "clCreateBuffer", what);
  ++counts_.allocations;
  return {owned(handle), size, live_};
}

Buffer OpenClContext::use(std::span<const std::byte> memory, std::shared_ptr<const void> owner) {
  cl::Int code = 0;
  // The cast is safe: the driver only reads it.
  cl::Memory handle =
      opencl().clCreateBuffer(context_, cl::kReadOnly | cl::kUseHostMemory, memory.size(),
                              const_cast<std::byte*>(memory.data()), &code);
  check(code, "clCreateBuffer", std::to_string(memory.size()) + " bytes of the host's memory");
  owners_.push_back(std::move(owner));
  return {owned(handle), memory.size(), nullptr};
}

Buffer OpenClContext::image_of(const Buffer& buffer) {
  const cl::ImageFormat format;
  const cl::ImageDescription description{.width = buffer.bytes() / DeviceFacts::kTexelBytes,
                                         .buffer = handle_of(buffer)};
  cl::Int code = 0;
  cl::Memory handle =
      opencl().clCreateImage(context_, cl::kReadOnly, &format, &description, nullptr, &code);
  check(code, "clCreateImage", "an image of " + std::to_string(buffer.bytes()) + " bytes");
  return {owned(handle), buffer.bytes(), nullptr};
}

void OpenClContext::write(const Buffer& buffer, std::span<const std::byte> from,
                          std::size_t offset) {
  if (from.empty()) return;
  wait();  // The blocking call below has no limit, so it must wait only for its own transfer.
  check(opencl().clEnqueueWriteBuffer(queue_, handle_of(buffer), cl::kTrue, offset, from.size(),
                                      from.data(), 0, nullptr, nullptr),
        "clEnqueueWriteBuffer", std::to_string(from.size()) + " bytes to the device");
  counts_.bytes_to_device += static_cast<std::int64_t>(from.size());
}

void OpenClContext::read(const Buffer& buffer, std::span<std::byte> to, std::size_t offset) {
  if (to.empty()) return;
  wait();
  check(opencl().clEnqueueReadBuffer(queue_, handle_of(buffer), cl::kTrue, offset, to.size(),
                                     to.data(), 0, nullptr, nullptr),
        "clEnqueueReadBuffer", std::to_string(to.size()) + " bytes to the host");
  counts_.bytes_to_host += static_cast<std::int64_t>(to.size());
}

void OpenClContext::copy(const Buffer& from, std::size_t from_offset, const Buffer& to,
                         std::size_t to_offset, std::size_t bytes) {
  if (bytes == 0) return;
  check_not_given_up();
  check(opencl().clEnqueueCopyBuffer(queue_, handle_of(from), handle_of(to), from_offset, to_offset,
                                     bytes, 0, nullptr, nullptr),
        "clEnqueueCopyBuffer", std::to_string(bytes) + " bytes on the device");
  enqueued("a copy");
}

std::string OpenClContext::identity() const {
  const DeviceFacts& device = facts();
  std::string text;
  for (const std::string& part :
       {device.platform, device.platform_version, device.vendor, device.name, device.version,
        device.driver, std::string(build_options(device))})
    text += std::to_string(part.size()) + ":" + part + "\n";
  return text;
}

std::shared_ptr<const CompiledKernel> OpenClContext::compile_source(
    const KernelDescription& description, const std::string& source, const std::string& key,
    std::vector<bool> writes) {
  const std::string& name = description.name;
  cl::Program program = load(key);
  if (program == nullptr) {
    program = build(name, source);
    keep(program, key);
  }
  cl::Int code = 0;
  cl::Kernel kernel = opencl().clCreateKernel(program, name.c_str(), &code);
  if (code != 0) opencl().clReleaseProgram(program);
  check(code, "clCreateKernel", "kernel " + name);
  return std::make_shared<const Kernel>(name, std::move(writes), program, kernel);
}

// Null if there is no binary on disk, or the driver does not take it.
cl::Program OpenClContext::load(const std::string& key) {
  const auto binary = cache_.find(key);
  if (!binary) return nullptr;
  const std::size_t bytes = binary->size();
  const unsigned char* data = binary->data();
  cl::Int of_binary = 0;
  cl::Int code = 0;
  cl::Program program =
      opencl().clCreateProgramWithBinary(context_, 1, &id_, &bytes, &data, &of_binary, &code);
  if (code != 0) return nullptr;
  if (of_binary != 0 ||
      opencl().clBuildProgram(program, 1, &id_, build_options(facts()), nullptr, nullptr) != 0) {
    opencl().clReleaseProgram(program);
    return nullptr;
  }
  ++counts_.from_cache;
  return program;
}

cl::Program OpenClContext::build(const std::string& name, const std::string& source) {
  const char* text = source.c_str();
  const std::size_t bytes = source.size();
  cl::Int code = 0;
  cl::Program program = opencl().clCreateProgramWithSource(context_, 1, &text, &bytes, &code);
  check(code, "clCreateProgramWithSource", "kernel " + name);
  code = opencl().clBuildProgram(program, 1, &id_, build_options(facts()), nullptr, nullptr);
  if (code != 0) {
    const std::string log = build_log(program);
    opencl().clReleaseProgram(program);
    check(code, "clBuildProgram", "kernel " + name + " on " + facts().title(), log);
  }
  ++counts_.compiled;
  return program;
}

std::string OpenClContext::build_log(cl::Program program) const {
  std::size_t bytes = 0;
  if (opencl().clGetProgramBuildInfo(program, id_, cl::kBuildLog, 0, nullptr, &bytes) != 0)
    return "";
  std::string log(bytes, '\0');
  opencl().clGetProgramBuildInfo(program, id_, cl::kBuildLog, bytes, log.data(), nullptr);
  while (!log.empty() && (log.back() == '\0' || log.back() == '\n')) log.pop_back();
  return log.substr(0, kShownLog);
}

// Without a binary from the driver nothing is kept, and the kernel is compiled again next time.
void OpenClContext::keep(cl::Program program, const std::string& key) {
  std::size_t bytes = 0;
  if (opencl().clGetProgramInfo(program, cl::kProgramBinarySizes, sizeof(bytes), &bytes, nullptr) !=
          0 ||
      bytes == 0) {
    return;
  }
  std::vector<unsigned char> binary(bytes);
  std::array<unsigned char*, 1> places{binary.data()};  // one for each device
  if (opencl().clGetProgramInfo(program, cl::kProgramBinaries, sizeof(places),
                                static_cast<void*>(places.data()), nullptr) == 0)
    cache_.keep(key, binary);
}

void OpenClContext::launch(const CompiledKernel& kernel, std::span<const KernelArgument> arguments,
                           const Grid& grid) {
  check_not_given_up();
  const std::string what = "kernel " + kernel.name();
  check_lanes(kernel, grid);
  cl::Kernel handle = static_cast<const Kernel&>(kernel).handle();
  cl::UInt index = 0;
  for (const KernelArgument& argument : arguments) {
    const cl::Int code = std::visit(
        [&](const auto& value) {
          if constexpr (std::is_pointer_v<std::decay_t<decltype(value)>>) {
            cl::Memory memory = handle_of(*value);
            return opencl().clSetKernelArg(handle, index, sizeof(cl::Memory),
                                           static_cast<const void*>(&memory));
          } else {
            return opencl().clSetKernelArg(handle, index, sizeof(value), &value);
          }
        },
        argument);
    check(code, "clSetKernelArg", what + ", argument " + std::to_string(index));
    ++index;
  }
  std::array<std::size_t, 3> all{};
  const std::array<std::size_t, 3> group{static_cast<std::size_t>(grid.lanes), 1, 1};
  for (std::size_t axis = 0; axis < 3; ++axis) {
    if (grid.groups[axis] == 0) return;
    all[axis] = static_cast<std::size_t>(grid.groups[axis]) * group[axis];
  }
  if (launched_.size() >= kMostEvents) collect();
  cl::Event event = nullptr;
  check(opencl().clEnqueueNDRangeKernel(queue_, handle, 3, nullptr, all.data(), group.data(), 0,
                                        nullptr, takes_times_ ? &event : nullptr),
        "clEnqueueNDRangeKernel", what);
  if (event != nullptr) launched_.push_back({kernel.name(), event, now_ns()});
  ++counts_.dispatches;
  enqueued(kernel.name());
}

void OpenClContext::collect() {
  wait();
  // `queued` is when the host enqueued the kernel, by the device's clock. That was before the call
  // returned, so the least difference of the two times is nearest to the difference of the clocks.
  std::int64_t apart = std::numeric_limits<std::int64_t>::max();
  std::vector<KernelTime> found;
  for (const Launched& one : std::exchange(launched_, {})) {
    std::array<cl::Bits, 3> nanoseconds{};
    cl::Int code = 0;
    for (const auto& [what, into] :
         {std::pair(cl::kEventQueued, 0), {cl::kEventStart, 1}, {cl::kEventEnd, 2}}) {
      const cl::Int of_query = opencl().clGetEventProfilingInfo(
          one.event, what, sizeof(cl::Bits), &nanoseconds[static_cast<std::size_t>(into)], nullptr);
      if (code == 0) code = of_query;
    }
    opencl().clReleaseEvent(one.event);
    check(code, "clGetEventProfilingInfo", "kernel " + one.kernel);
    const auto [queued, start, end] = nanoseconds;
    apart = std::min(apart, one.enqueued_ns - static_cast<std::int64_t>(queued));
    found.push_back(
        {one.kernel, static_cast<double>(end - start) * 1e-9, static_cast<std::int64_t>(start)});
  }
  for (KernelTime& time : found) {
    time.begin_ns += apart;
    if (times_.size() < kMostTimes) times_.push_back(std::move(time));
  }
}

std::vector<KernelTime> OpenClContext::take_times() {
  collect();
  return std::exchange(times_, {});
}

}  // namespace flownpu::gpu
