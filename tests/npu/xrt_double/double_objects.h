// SPDX-License-Identifier: Apache-2.0
// What stands behind XRT's handles in the double.
//
// An xclbin is a file that begins as real ones do, with "xclbin2" and a zero; then 8 bytes with how
// many bytes follow, and these: an array's words (aie/emulator/words.py). Instructions are the
// words of one of its sequences, of each the low half first, then the high one.
#pragma once

#include <xrt/experimental/xrt_kernel.h>
#include <xrt/experimental/xrt_xclbin.h>
#include <xrt/xrt_bo.h>
#include <xrt/xrt_device.h>
#include <xrt/xrt_hw_context.h>
#include <xrt/xrt_kernel.h>

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "tests/npu/device_double/emulated_array.h"
#include "tests/npu/device_double/state.h"

namespace xrt {

class xclbin_impl {
 public:
  device_double::Alive alive{"xclbin"};
  uuid id;
  std::vector<std::int64_t> words;
};

class xclbin::kernel_impl {
 public:
  std::string name;
};

}  // namespace xrt

namespace xrt_core {

class device {
 public:
  device_double::Alive alive{"device"};
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<xrt::xclbin_impl>> xclbins;
};

}  // namespace xrt_core

namespace xrt {

// A hardware context: an array of its own, and the calls that it is to run, in their order.
class hw_context_impl {
 public:
  device_double::Alive alive{"context"};
  std::shared_ptr<xrt_core::device> device;
  std::shared_ptr<xclbin_impl> xclbin;
  std::mutex mutex;  // for what follows
  std::unique_ptr<flownpu::emulator::Emulator> emulator;
  std::deque<run_impl*> calls;
};

class kernel_impl {
 public:
  device_double::Alive alive{"kernel"};
  hw_context context;
};

// Host and device have a copy each, so that a sync that is missing shows.
class bo_impl {
 public:
  bo_impl(std::shared_ptr<xrt_core::device> device, std::size_t size, bo::flags flags,
          memory_group group);
  bo_impl(std::shared_ptr<bo_impl> parent, std::size_t size, std::size_t offset);
  bo_impl(const bo_impl&) = delete;
  bo_impl& operator=(const bo_impl&) = delete;
  ~bo_impl();

  // The buffer whose memory this is a part of.
  bo_impl& whole() { return parent_ == nullptr ? *this : parent_->whole(); }
  std::size_t offset() const { return parent_ == nullptr ? 0 : offset_ + parent_->offset(); }
  std::byte* host() { return whole().host_ + offset(); }
  std::span<std::byte> on_device() { return {whole().device_copy_ + offset(), size_}; }
  std::size_t size() const { return size_; }
  bo::flags flags() { return whole().flags_; }
  memory_group group() { return whole().group_; }
  // Calls under way that use it.
  std::atomic<int>& users() { return whole().users_; }
  // Those of them that hang: what they have not written yet may be read all the same.
  std::atomic<int>& hanging() { return whole().hanging_; }

 private:
  device_double::Alive alive_;
  std::shared_ptr<xrt_core::device> device_;
  std::shared_ptr<bo_impl> parent_;
  std::size_t size_;
  std::size_t offset_ = 0;
  bo::flags flags_{};
  memory_group group_ = 0;
  std::byte* host_ = nullptr;
  std::byte* device_copy_ = nullptr;
  std::atomic<int> users_{0};
  std::atomic<int> hanging_{0};
};

// Runs as late as it can: when it is waited for.
class run_impl {
 public:
  explicit run_impl(std::shared_ptr<kernel_impl> kernel) : kernel_(std::move(kernel)) {}
  run_impl(const run_impl&) = delete;
  run_impl& operator=(const run_impl&) = delete;
  ~run_impl();

  void set(int index, const void* value, std::size_t bytes);
  void set(int index, const std::shared_ptr<bo_impl>& buffer);
  // Puts it behind the calls of its context.
  void submit();
  // Runs the calls of the context up to this one; false: one of them hangs.
  bool advance(std::chrono::milliseconds timeout);
  void abort() { finish(ERT_CMD_STATE_ABORT, "a call before it failed"); }

  hw_context_impl& context() { return *kernel_->context.get_handle(); }
  bool under_way() const { return state_ == ERT_CMD_STATE_SUBMITTED; }
  ert_cmd_state state() const { return state_; }
  const std::string& reason() const { return reason_; }

  bool in_list = false;

 private:
  using Scalar = std::vector<std::byte>;
  using Pointer = std::weak_ptr<bo_impl>;

  void execute();
  bool hangs(std::chrono::milliseconds timeout);
  void count_hanging(int change);
  flownpu::emulator::Sequence read_instructions();
  std::shared_ptr<bo_impl> buffer(int index);
  std::uint64_t scalar(int index, std::size_t bytes);
  void finish(ert_cmd_state state, const std::string& reason);

  device_double::Alive alive_{"run"};
  std::shared_ptr<kernel_impl> kernel_;
  std::map<int, std::variant<Scalar, Pointer>> arguments_;
  ert_cmd_state state_ = ERT_CMD_STATE_NEW;
  std::string reason_;
  // Milliseconds until the driver's watchdog ends it; -1: it never does.
  std::int64_t watchdog_ = 0;
  bool hung_ = false;
  bool lost_ = false;
  bool told_ = false;   // the buffers, that it hangs
  int hung_since_ = 0;  // watchdog_rounds()
  // While it is under way.
  std::vector<Pointer> used_;
};

}  // namespace xrt
