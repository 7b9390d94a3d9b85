// SPDX-License-Identifier: Apache-2.0
#include "tests/npu/xdna_driver/device_file.h"

#include <xrt/detail/ert.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <utility>

#include "tests/npu/xdna_driver/packet_fields.h"

namespace xdna_driver {
namespace {

using std::chrono::steady_clock;

// The array of XDNA2: rows 0 (shim), 1 (memory) and 2-5 (cores).
constexpr ArrayInfo kArray = {
    .column_bytes = 1U << 25U,
    .columns = 8,
    .rows = 6,
    .version = {2, 0},
    .core = {.rows = 4, .first_row = 2, .dma_channels = 2, .locks = 16, .events = 128, .pad = {}},
    .memory = {.rows = 1, .first_row = 1, .dma_channels = 6, .locks = 64, .events = 128, .pad = {}},
    .shim = {.rows = 1, .first_row = 0, .dma_channels = 2, .locks = 16, .events = 128, .pad = {}},
};
constexpr std::int64_t kContexts = 16;
// Protocols as 1000 * major + minor: the firmware's unless a test sets another, and the first of
// XDNA2 with which a context may use more than the first part of the heap (Linux 7's npu4_regs.c).
constexpr std::int64_t kProtocol = 7003;
constexpr std::int64_t kGrowingHeap = 6018;

// The version that the test wrote into sysfs, such as "255.0.5.35", so that requests say the same.
FirmwareInfo firmware() {
  const std::filesystem::path devices = machine_root() + "/sys/bus/pci/drivers/amdxdna";
  FirmwareInfo found{};
  for (const auto& device : std::filesystem::directory_iterator(devices)) {
    std::ifstream file(device.path() / "fw_version");
    char dot = 0;
    if (file >> found.major >> dot >> found.minor >> dot >> found.patch >> dot >> found.build)
      break;
  }
  return found;
}

// The negative error number of this fault if it happens now; else 0.
int refused(const char* fault) { return -static_cast<int>(struck(fault).value_or(0)); }

// The object at an address that the program gave.
template <typename Structure>
Structure* at(std::uint64_t address) {
  return reinterpret_cast<Structure*>(address);  // NOLINT(performance-no-int-to-ptr): the interface
}

template <typename Answer>
int write(const Info& request, const Answer& answer) {
  if (request.bytes < sizeof(answer)) return -EINVAL;
  std::memcpy(at<void>(request.buffer), &answer, sizeof(answer));
  return 0;
}

int result_of(Context::Waited waited) {
  if (waited == Context::Waited::kLost) return -ENODEV;
  return waited == Context::Waited::kEnded ? 0 : -ETIME;
}

template <typename Structure>
Structure& as(void* argument) {
  return *static_cast<Structure*>(argument);
}

}  // namespace

DeviceFile::~DeviceFile() {
  if (!contexts_.empty()) violate("the device was closed with a context open");
  if (!timelines_.empty()) violate("the device was closed with a timeline open");
  if (buffers_.open_count() != 0) {
    violate("the device was closed with a buffer open");
  }
  timelines_.clear();
  contexts_.clear();
  buffers_.clear();
}

int DeviceFile::handle(Request request, void* argument) {
  if (is_lost()) return -ENODEV;
  switch (request) {
    case Request::kCreateContext:
      return create_context(as<CreateContext>(argument));
    case Request::kDestroyContext:
      return destroy_context(as<DestroyContext>(argument));
    case Request::kConfigureContext:
      return configure_context(as<ConfigureContext>(argument));
    case Request::kCreateBuffer:
      return create_buffer(as<CreateBuffer>(argument));
    case Request::kBufferInfo:
      return buffer_info(as<BufferInfo>(argument));
    case Request::kSyncBuffer:
      return sync_buffer(as<SyncBuffer>(argument));
    case Request::kExecute:
      return execute(as<Execute>(argument));
    case Request::kWait:
      return wait(as<Wait>(argument));
    case Request::kInfo:
      return info(as<Info>(argument));
    case Request::kGemClose:
      return close_buffer(as<Close>(argument));
    case Request::kTimelineDestroy:
      return destroy_timeline(as<Close>(argument));
    case Request::kTimelineWait:
      return wait_for_timeline(as<TimelineWait>(argument));
    default:
      return -EOPNOTSUPP;
  }
}

int DeviceFile::create_context(CreateContext& request) {
  if (const int error = refused("context"); error != 0) return error;
  if (has_more_heap_than_the_firmware_takes()) return -EOPNOTSUPP;
  const std::lock_guard lock(mutex_);
  if (contexts_.size() >= static_cast<std::size_t>(setting("contexts", kContexts))) return -ENOSPC;
  auto made = std::make_shared<Context>(buffers_);
  request.handle = next_handle_++;
  contexts_[request.handle] = made;
  request.syncobj_handle = 0;
  if (setting("timelines", 1) != 0) {
    request.syncobj_handle = next_handle_++;
    timelines_[request.syncobj_handle] = made;
  }
  return 0;
}

int DeviceFile::destroy_context(const DestroyContext& request) {
  std::shared_ptr<Context> destroyed;
  const std::lock_guard lock(mutex_);
  const auto found = contexts_.find(request.handle);
  if (found == contexts_.end()) return -EINVAL;
  destroyed = std::move(found->second);
  contexts_.erase(found);
  return 0;
}

int DeviceFile::configure_context(const ConfigureContext& request) {
  const std::shared_ptr<Context> configured = context(request.handle);
  if (configured == nullptr || request.type != 0) return -EINVAL;
  const auto& units = *at<const ComputeUnits>(request.value);
  const std::shared_ptr<Buffer> buffer = buffers_.find(units.first.buffer);
  if (units.count != 1 || buffer == nullptr) return -EINVAL;
  try {
    configured->configure(*buffer);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "[xdna_driver] %s\n", error.what());
    return -EINVAL;
  }
  return 0;
}

int DeviceFile::create_buffer(CreateBuffer& request) {
  const auto type = static_cast<BufferType>(request.type);
  const char* const fault = type == BufferType::kHeap      ? "heap"
                            : type == BufferType::kCommand ? "command"
                                                           : "allocate";
  if (const int error = refused(fault); error != 0) return error;
  const std::int64_t made = buffers_.create(type, request.size);
  if (made < 0) return static_cast<int>(made);
  // Contexts get to know a new part of the heap when the first buffer is put into it.
  if (type == BufferType::kDevice && has_more_heap_than_the_firmware_takes()) {
    const std::lock_guard lock(mutex_);
    if (!contexts_.empty()) {
      buffers_.close(static_cast<std::uint32_t>(made));
      return -EOPNOTSUPP;
    }
  }
  request.handle = static_cast<std::uint32_t>(made);
  return 0;
}

int DeviceFile::buffer_info(BufferInfo& request) {
  const std::shared_ptr<Buffer> buffer = buffers_.find(request.handle);
  if (buffer == nullptr) return -ENOENT;
  // Buffers in the heap are mapped with the heap.
  request.map_offset = buffer->type() == BufferType::kDevice ? kNoAddress : buffer->offset();
  request.vaddr = 0;
  request.address = buffer->address();
  return 0;
}

int DeviceFile::sync_buffer(const SyncBuffer& request) {
  if (const int error = refused("move"); error != 0) return error;
  const std::shared_ptr<Buffer> buffer = buffers_.find(request.handle);
  if (buffer == nullptr) return -ENOENT;
  if (request.offset > buffer->size() || request.size > buffer->size() - request.offset) {
    return -EINVAL;
  }
  buffer->move(request.direction == 0, request.offset, request.size);
  return 0;
}

int DeviceFile::execute(Execute& request) {
  if (const int error = refused("submit"); error != 0) return error;
  const std::shared_ptr<Context> on = context(request.context);
  if (on == nullptr || request.type != 0 || request.command_count != 1) return -EINVAL;
  Job job;
  job.command = buffers_.find(static_cast<std::uint32_t>(request.commands));
  if (job.command == nullptr || job.command->type() != BufferType::kCommand) return -EINVAL;
  auto* const packet = reinterpret_cast<ert_packet*>(job.command->host());
  if (const auto* const chain = get_ert_cmd_chain_data(packet); chain != nullptr) {
    const auto count = read_at<std::uint32_t>(chain, offsetof(ert_cmd_chain_data, command_count));
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::size_t place = offsetof(ert_cmd_chain_data, data) + i * sizeof(std::uint64_t);
      job.chained.push_back(
          buffers_.find(static_cast<std::uint32_t>(read_at<std::uint64_t>(chain, place))));
      if (job.chained.back() == nullptr) return -ENOENT;
    }
  }
  const auto* const handles = at<const std::uint32_t>(request.arguments);
  for (std::uint32_t i = 0; i < request.argument_count; ++i) {
    job.used.push_back(buffers_.find(handles[i]));
    if (job.used.back() == nullptr) return -ENOENT;
  }
  job.used.push_back(job.command);
  job.used.insert(job.used.end(), job.chained.begin(), job.chained.end());
  packet->state = ERT_CMD_STATE_NEW;
  const std::int64_t number = on->submit(std::move(job));
  if (number < 0) return static_cast<int>(number);
  request.sequence = static_cast<std::uint64_t>(number);
  return 0;
}

int DeviceFile::wait(const Wait& request) {
  const std::shared_ptr<Context> waited = context(request.context);
  if (waited == nullptr) return -EINVAL;
  std::optional<steady_clock::time_point> deadline;
  if (request.timeout != 0) {
    deadline = steady_clock::now() + std::chrono::milliseconds(request.timeout);
  } else {
    violate("a call was waited for without a limit");
  }
  return result_of(waited->wait(request.sequence, deadline));
}

int DeviceFile::wait_for_timeline(const TimelineWait& request) {
  if (request.count != 1) return -EOPNOTSUPP;
  std::shared_ptr<Context> waited;
  {
    const std::lock_guard lock(mutex_);
    const auto found = timelines_.find(*at<const std::uint32_t>(request.handles));
    if (found == timelines_.end()) return -ENOENT;
    waited = found->second;
  }
  std::optional<steady_clock::time_point> deadline;
  if (request.deadline != std::numeric_limits<std::int64_t>::max()) {
    deadline = steady_clock::time_point(std::chrono::nanoseconds(request.deadline));
  } else {
    violate("a call was waited for without a limit");
  }
  return result_of(waited->wait(*at<const std::uint64_t>(request.points), deadline));
}

int DeviceFile::info(const Info& request) {
  switch (static_cast<InfoParameter>(request.parameter)) {
    case InfoParameter::kArray:
      return write(request, kArray);
    case InfoParameter::kArrayVersion:
      return write(request, kArray.version);
    case InfoParameter::kFirmware:
      return write(request, firmware());
    default:
      return -EOPNOTSUPP;
  }
}

int DeviceFile::close_buffer(const Close& request) {
  return buffers_.close(request.handle) ? 0 : -EINVAL;
}

int DeviceFile::destroy_timeline(const Close& request) {
  const std::lock_guard lock(mutex_);
  return timelines_.erase(request.handle) == 1 ? 0 : -EINVAL;
}

bool DeviceFile::has_more_heap_than_the_firmware_takes() {
  return buffers_.heap_parts() > 1 && setting("protocol", kProtocol) < kGrowingHeap;
}

std::shared_ptr<Context> DeviceFile::context(std::uint32_t handle) {
  const std::lock_guard lock(mutex_);
  const auto found = contexts_.find(handle);
  return found == contexts_.end() ? nullptr : found->second;
}

}  // namespace xdna_driver
