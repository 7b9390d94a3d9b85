// SPDX-License-Identifier: Apache-2.0
// Calls, and lists of them.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "tests/npu/xrt_double/double_objects.h"

namespace xrt {
namespace {

constexpr int kOpcode = 0;
constexpr int kInstructions = 1;
constexpr int kCount = 2;
constexpr int kFirstBuffer = 3;
constexpr std::uint64_t kRunInstructions = 3;
// A wait that times out takes no longer, so that tests are fast.
constexpr std::chrono::milliseconds kLongestWait{5};

std::string index_text(int index) { return "argument " + std::to_string(index) + " of a call"; }

}  // namespace

run_impl::~run_impl() {
  if (!under_way()) return;
  device_double::violate("a run was destroyed that is under way: XRT ends the process then");
  const std::lock_guard lock(context().mutex);
  std::erase(context().calls, this);
  finish(ERT_CMD_STATE_ABORT, "it was destroyed");
}

void run_impl::set(int index, const void* value, std::size_t bytes) {
  if (index != kOpcode && index != kCount) {
    device_double::violate(index_text(index) + " is a number, and should be a buffer");
  }
  Scalar content(bytes);
  std::memcpy(content.data(), value, bytes);
  arguments_[index] = std::move(content);
}

void run_impl::set(int index, const std::shared_ptr<bo_impl>& buffer) {
  if (index == kOpcode || index == kCount) {
    device_double::violate(index_text(index) + " is a buffer, and should be a number");
  }
  const bool is_instructions = index == kInstructions;
  const auto wanted = is_instructions ? bo::flags::cacheable : bo::flags::host_only;
  if (buffer->flags() != wanted) {
    device_double::violate(index_text(index) + " is a buffer with other flags than it needs");
  }
  if (is_instructions &&
      buffer->group() != static_cast<memory_group>(kernel(kernel_).group_id(kInstructions))) {
    device_double::violate(index_text(index) + " is a buffer of another memory group");
  }
  arguments_[index] = Pointer(buffer);
}

std::shared_ptr<bo_impl> run_impl::buffer(int index) {
  const auto found = arguments_.find(index);
  if (found == arguments_.end()) throw std::runtime_error(index_text(index) + " was not set");
  const auto* pointer = std::get_if<Pointer>(&found->second);
  auto buffer = pointer == nullptr ? nullptr : pointer->lock();
  if (buffer == nullptr) throw std::runtime_error(index_text(index) + " is no buffer any more");
  return buffer;
}

std::uint64_t run_impl::scalar(int index, std::size_t bytes) {
  const auto found = arguments_.find(index);
  const auto* content = found == arguments_.end() ? nullptr : std::get_if<Scalar>(&found->second);
  if (content == nullptr || content->size() != bytes) {
    device_double::violate(index_text(index) + " should have " + std::to_string(bytes) + " bytes");
    return 0;
  }
  std::uint64_t value = 0;
  std::memcpy(&value, content->data(), bytes);
  return value;
}

void run_impl::submit() {
  if (under_way()) throw std::runtime_error("bad command state, can't launch");
  const std::lock_guard lock(context().mutex);
  for (const auto& [index, argument] : arguments_) {
    if (const auto* pointer = std::get_if<Pointer>(&argument)) {
      if (const auto buffer = pointer->lock()) ++buffer->users();
      used_.push_back(*pointer);
    }
  }
  state_ = ERT_CMD_STATE_SUBMITTED;
  context().calls.push_back(this);
}

bool run_impl::advance(std::chrono::milliseconds timeout) {
  auto& calls = context().calls;
  while (under_way()) {
    const std::lock_guard lock(context().mutex);
    run_impl& first = *calls.front();
    if (first.hangs(timeout)) return false;
    calls.pop_front();
    if (first.under_way()) first.execute();
  }
  return true;
}

bool run_impl::hangs(std::chrono::milliseconds timeout) {
  if (!hung_ && !lost_) {
    if (const auto milliseconds = device_double::struck("hang")) {
      hung_ = true;
      watchdog_ = *milliseconds;
    }
    lost_ = device_double::struck("lost").has_value();
    hung_since_ = device_double::watchdog_rounds();
    if (hung_ || lost_) count_hanging(1);
  }
  if (device_double::watchdog_rounds() != hung_since_) watchdog_ = 0;
  if (lost_ && device_double::watchdog_rounds() == hung_since_) {
    throw std::system_error(ENODEV, std::system_category(), "DRM_IOCTL_AMDXDNA_WAIT_CMD failed");
  }
  if (watchdog_ >= 0 && timeout.count() >= watchdog_) {
    if (hung_ || lost_) finish(ERT_CMD_STATE_TIMEOUT, "the context made no progress");
    return false;
  }
  if (timeout.count() == 0) {
    device_double::violate("a call was waited for without a limit");
    throw std::runtime_error("this wait would not have ended");
  }
  if (watchdog_ > 0) watchdog_ -= timeout.count();
  std::this_thread::sleep_for(std::min(timeout, kLongestWait));
  return true;
}

void run_impl::count_hanging(int change) {
  for (const Pointer& pointer : used_) {
    if (const auto buffer = pointer.lock()) buffer->hanging() += change;
  }
  told_ = change > 0;
}

flownpu::emulator::Sequence run_impl::read_instructions() {
  const std::shared_ptr<bo_impl> words = buffer(kInstructions);
  const std::span<std::byte> bytes = words->on_device();
  if (scalar(kOpcode, sizeof(std::uint64_t)) != kRunInstructions) {
    device_double::violate("a call's opcode is not that of instructions");
  }
  if (scalar(kCount, sizeof(std::uint32_t)) * sizeof(std::uint32_t) != bytes.size()) {
    device_double::violate("a call does not give the number of its instructions' words");
  }
  return device_double::read_instructions(bytes);
}

void run_impl::execute() {
  if (const auto state = device_double::struck("error")) {
    finish(static_cast<ert_cmd_state>(*state), "the double was told so");
    return;
  }
  try {
    const flownpu::emulator::Sequence sequence = read_instructions();
    const std::size_t count = arguments_.size() - kFirstBuffer;
    if (count != sequence.buffers.size()) {
      throw std::runtime_error("a call has " + std::to_string(count) + " buffers, and needs " +
                               std::to_string(sequence.buffers.size()));
    }
    std::vector<std::span<std::byte>> buffers;
    for (std::size_t i = 0; i < count; ++i) {
      buffers.push_back(buffer(kFirstBuffer + static_cast<int>(i))->on_device());
      if (buffers.back().size() != sequence.buffers[i].bytes) {
        throw std::runtime_error("buffer " + sequence.buffers[i].name + " has " +
                                 std::to_string(buffers.back().size()) + " bytes, and needs " +
                                 std::to_string(sequence.buffers[i].bytes));
      }
    }
    // The host's next call takes its time to come; one that is there already does not.
    context().emulator->run(sequence, buffers, {.seed = 0, .settle = context().calls.empty()});
    finish(ERT_CMD_STATE_COMPLETED, "");
  } catch (const std::exception& error) {
    finish(ERT_CMD_STATE_ERROR, error.what());
  }
}

void run_impl::finish(ert_cmd_state state, const std::string& reason) {
  state_ = state;
  reason_ = reason;
  if (told_) count_hanging(-1);
  for (const Pointer& pointer : used_) {
    if (const auto buffer = pointer.lock()) --buffer->users();
  }
  used_.clear();
}

class run::command_error_impl {
 public:
  ert_cmd_state state;
  std::string what;
};

run::command_error::command_error(const run& failed, const std::string& what)
    : detail::pimpl<command_error_impl>(std::make_shared<command_error_impl>(
          command_error_impl{failed.get_handle()->state(), what})) {}
ert_cmd_state run::command_error::get_command_state() const { return handle->state; }
const char* run::command_error::what() const noexcept { return handle->what.c_str(); }
run::aie_error::aie_error(const run& failed, const std::string& what)
    : command_error(failed, what) {}

run::run(const kernel& kernel) : handle(std::make_shared<run_impl>(kernel.get_handle())) {}
run::~run() = default;

void run::set_arg_at_index(int index, const void* value, std::size_t bytes) {
  handle->set(index, value, bytes);
}
void run::set_arg_at_index(int index, const bo& buffer) { handle->set(index, buffer.get_handle()); }

void run::start() {
  if (handle->in_list) throw std::runtime_error("Run object belongs to a runlist");
  device_double::throw_if_struck("submit", "DRM_IOCTL_AMDXDNA_EXEC_CMD IOCTL failed");
  handle->submit();
}

std::cv_status run::wait2(const std::chrono::milliseconds& timeout) const {
  if (!handle->advance(timeout)) return std::cv_status::timeout;
  if (handle->state() != ERT_CMD_STATE_COMPLETED) throw aie_error(*this, handle->reason());
  return std::cv_status::no_timeout;
}

class runlist::command_error_impl {
 public:
  run failed;
  ert_cmd_state state;
  std::string what;
};

runlist::command_error::command_error(const run& failed, ert_cmd_state state,
                                      const std::string& what)
    : detail::pimpl<command_error_impl>(
          std::make_shared<command_error_impl>(command_error_impl{failed, state, what})) {}
run runlist::command_error::get_run() const { return handle->failed; }
ert_cmd_state runlist::command_error::get_command_state() const { return handle->state; }
const char* runlist::command_error::what() const noexcept { return handle->what.c_str(); }
runlist::aie_error::aie_error(const run& failed, ert_cmd_state state, const std::string& what)
    : command_error(failed, state, what) {}

class runlist_impl {
 public:
  explicit runlist_impl(hw_context given) : context(std::move(given)) {}
  runlist_impl(const runlist_impl&) = delete;
  runlist_impl& operator=(const runlist_impl&) = delete;
  ~runlist_impl() {
    if (is_running) device_double::violate("a runlist was destroyed that is under way");
    for (const run& run : runs) run.get_handle()->in_list = false;
  }

  device_double::Alive alive{"runlist"};
  hw_context context;
  std::vector<run> runs;
  bool is_running = false;
};

runlist::runlist(const hw_context& context)
    : detail::pimpl<runlist_impl>(std::make_shared<runlist_impl>(context)) {}
runlist::~runlist() = default;

void runlist::add(const run& run) {
  if (&run.get_handle()->context() != handle->context.get_handle().get()) {
    throw std::runtime_error("a run of another context");
  }
  if (handle->is_running || run.get_handle()->in_list) {
    throw std::runtime_error("runlist must be idle before adding run objects");
  }
  run.get_handle()->in_list = true;
  handle->runs.push_back(run);
}

void runlist::execute() {
  if (handle->is_running) throw std::runtime_error("runlist must be idle before submitting");
  // As XRT does: whoever gets this must wait all the same.
  handle->is_running = true;
  device_double::throw_if_struck("submit", "DRM_IOCTL_AMDXDNA_EXEC_CMD IOCTL failed");
  for (const run& run : handle->runs) run.get_handle()->submit();
}

std::cv_status runlist::wait(const std::chrono::milliseconds& timeout) const {
  for (std::size_t i = 0; handle->is_running && i < handle->runs.size(); ++i) {
    run_impl& run = *handle->runs[i].get_handle();
    if (!run.advance(timeout)) return std::cv_status::timeout;
    if (run.state() == ERT_CMD_STATE_NEW || run.state() == ERT_CMD_STATE_COMPLETED) continue;
    handle->is_running = false;
    const std::lock_guard lock(run.context().mutex);
    for (std::size_t rest = i + 1; rest < handle->runs.size(); ++rest) {
      run_impl* const aborted = handle->runs[rest].get_handle().get();
      std::erase(run.context().calls, aborted);
      aborted->abort();
    }
    throw aie_error(handle->runs[i], run.state(), run.reason());
  }
  handle->is_running = false;
  return std::cv_status::no_timeout;
}

}  // namespace xrt
