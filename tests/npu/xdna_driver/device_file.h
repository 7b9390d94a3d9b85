// SPDX-License-Identifier: Apache-2.0
// /dev/accel/accel0 as a program has it open: its buffers, contexts and timelines, and the driver's
// answers to requests.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "tests/npu/xdna_driver/buffers.h"
#include "tests/npu/xdna_driver/context.h"
#include "tests/npu/xdna_driver/interface.h"
#include "tests/npu/xdna_driver/state.h"

namespace xdna_driver {

class DeviceFile {
 public:
  // `file`: the sparse file in which the buffers' memory lies.
  explicit DeviceFile(int file) : buffers_(file) {}
  ~DeviceFile();
  DeviceFile(const DeviceFile&) = delete;
  DeviceFile& operator=(const DeviceFile&) = delete;

  // 0, or a negative error number.
  int handle(Request request, void* argument);

 private:
  int create_context(CreateContext& request);
  int destroy_context(const DestroyContext& request);
  int configure_context(const ConfigureContext& request);
  int create_buffer(CreateBuffer& request);
  int buffer_info(BufferInfo& request);
  int sync_buffer(const SyncBuffer& request);
  int execute(Execute& request);
  int wait(const Wait& request);
  int wait_for_timeline(const TimelineWait& request);
  int info(const Info& request);
  int close_buffer(const Close& request);
  int destroy_timeline(const Close& request);

  std::shared_ptr<Context> context(std::uint32_t handle);
  // Whether the heap has several parts and the firmware takes only the first.
  bool has_more_heap_than_the_firmware_takes();

  Alive alive_{"file"};
  Buffers buffers_;
  std::mutex mutex_;
  std::uint32_t next_handle_ = 1;
  std::map<std::uint32_t, std::shared_ptr<Context>> contexts_;
  // By each timeline's handle, the context whose commands are the timeline's points.
  std::map<std::uint32_t, std::shared_ptr<Context>> timelines_;
};

}  // namespace xdna_driver
