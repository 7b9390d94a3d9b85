// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/xrt/dispatch.h"

#include <xrt/experimental/xrt_ext.h>
#include <xrt/experimental/xrt_xclbin.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <span>
#include <system_error>
#include <thread>
#include <utility>

#include "ops/npu/xrt/status.h"

namespace flownpu::npu::xrt_abi {
namespace {

// Arguments of aiecc's kernels: the action (3: run the instructions), the instructions, their
// number of words, and the host buffers. mlir-aie's C++ examples give the number in words, its
// Python in bytes; the controller reads the length from the instructions' head in any case.
constexpr std::uint64_t kRunInstructions = 3;
constexpr int kOpcodeArgument = 0;
constexpr int kInstructionsArgument = 1;
constexpr int kCountArgument = 2;
constexpr int kFirstBufferArgument = 3;

// The kernel's name as aiecc writes it; more may follow.
constexpr std::string_view kKernelName = "MLIR_AIE";

xrt::xclbin::kernel kernel_of(const xrt::xclbin& xclbin) {
  for (const xrt::xclbin::kernel& kernel : xclbin.get_kernels()) {
    if (kernel.get_name().compare(0, kKernelName.size(), kKernelName) == 0) return kernel;
  }
  throw StatusError(Status::kDesign, "expected a kernel MLIR_AIE, found none");
}

StatusError failure_of(ert_cmd_state state, const char* what) {
  if (state == ERT_CMD_STATE_TIMEOUT || state == ERT_CMD_STATE_NORESPONSE) {
    return {Status::kTimeout, std::string("the driver's watchdog ended it (timeout): ") + what};
  }
  return {Status::kCommand, std::string("the array ended with an error: ") + what};
}

// Whether a command has ended in this state; XRT has no name for such states.
bool is_end(ert_cmd_state state) {
  return state >= ERT_CMD_STATE_COMPLETED && state != ERT_CMD_STATE_SUBMITTED;
}

// Limit for waiting for a command that has ended; not 0 ms, which XRT takes for no limit.
constexpr std::chrono::milliseconds kHasEnded{1};
// How often to ask the driver whether the device is still there.
constexpr std::chrono::milliseconds kDeviceCheck{100};

}  // namespace

Context::Context(const xrt::device& opened, const std::string& file) : device(opened) {
  const xrt::xclbin xclbin(file);
  const xrt::xclbin::kernel found = kernel_of(xclbin);
  most_buffers =
      found.get_num_args() - std::min<std::size_t>(found.get_num_args(), kFirstBufferArgument);
  context = xrt::hw_context(device, device.register_xclbin(xclbin));
  kernel = xrt::kernel(context, found.get_name());
}

Instructions::Instructions(const Context& context, const std::uint32_t* words, std::size_t count)
    : buffer_(context.device, count * sizeof(std::uint32_t), xrt::bo::flags::cacheable,
              static_cast<xrt::memory_group>(context.kernel.group_id(kInstructionsArgument))),
      words_(buffer_.map<std::uint32_t*>()),
      count_(static_cast<std::uint32_t>(count)),
      last_(count) {
  std::memcpy(words_, words, count * sizeof(std::uint32_t));
}

void Instructions::write(std::size_t word, std::uint32_t value) {
  if (words_[word] == value) return;
  words_[word] = value;
  first_ = std::min(first_, word);
  last_ = std::max(last_, word + 1);
}

std::size_t Instructions::flush() {
  if (first_ >= last_) return 0;
  const std::size_t bytes = (last_ - first_) * sizeof(std::uint32_t);
  buffer_.sync(XCL_BO_SYNC_BO_TO_DEVICE, bytes, first_ * sizeof(std::uint32_t));
  first_ = count_;
  last_ = 0;
  return bytes;
}

namespace {

class Submission {
 public:
  // Prepares the runs, and flushes the instructions.
  Submission(std::shared_ptr<Context> context, std::span<const Call> calls)
      : context_(std::move(context)) {
    for (const Call& call : calls) {
      Instructions& instructions = *instructions_.emplace_back(call.sequence->instructions);
      word_bytes_ += instructions.flush();
      xrt::run& run = runs_.emplace_back(context_->kernel);
      run.set_arg(kOpcodeArgument, kRunInstructions);
      run.set_arg(kInstructionsArgument, instructions.buffer());
      run.set_arg(kCountArgument, instructions.count());
      for (std::size_t i = 0; i < call.count; ++i) {
        const View& view = call.arguments[i];
        const xrt::bo& whole = view.buffer->buffer;
        const bool is_whole = view.offset == 0 && view.bytes == whole.size();
        buffers_.push_back(is_whole ? whole : xrt::bo(whole, view.bytes, view.offset));
        run.set_arg(kFirstBufferArgument + static_cast<int>(i), buffers_.back());
      }
    }
    if (runs_.size() > 1) {
      list_ = xrt::runlist(context_->context);
      for (const xrt::run& run : runs_) list_.add(run);
    }
  }

  std::size_t word_bytes() const { return word_bytes_; }

  // If this throws, the calls may still be under way.
  void start() {
    under_way_ = true;
    if (runs_.size() > 1) {
      // If it throws, XRT may have submitted some of them, and they have to be waited for.
      list_.execute();
      return;
    }
    try {
      runs_.front().start();
    } catch (...) {
      under_way_ = false;
      throw;
    }
  }

  // Throws StatusError if a call failed, and sets `failed` to its number if XRT knows it. Also
  // throws it if the calls have not ended in time or the device is lost; the calls may then still
  // be under way.
  void wait(std::chrono::milliseconds timeout, std::size_t& failed) {
    if (!under_way_) return;
    Sleeper sleeper(instructions_.front()->expectation());
    const auto deadline = Sleeper::Clock::now() + timeout;
    auto next_check = Sleeper::Clock::now() + kDeviceCheck;
    while (!has_ended(failed)) {
      const auto now = Sleeper::Clock::now();
      if (now >= std::min(deadline, next_check)) {
        require_device();
        next_check = now + kDeviceCheck;
      }
      if (now >= deadline) {
        throw StatusError(Status::kTimeout, "the array did not answer within " +
                                                std::to_string(timeout.count()) + " ms (timeout)");
      }
      // Not beyond the next check, because the call may take longer than expected.
      sleeper.sleep(std::min(deadline, next_check));
    }
    sleeper.learn();
    under_way_ = false;
  }

  // Waits without throwing. Returns whether the calls have ended.
  bool ends_within(std::chrono::milliseconds timeout) noexcept {
    std::size_t failed = 0;
    // Tries again until the deadline, because a lost device may come back.
    const auto deadline = Sleeper::Clock::now() + timeout;
    do {
      const auto left =
          std::chrono::ceil<std::chrono::milliseconds>(deadline - Sleeper::Clock::now());
      guard(Stage::kWait, {}, [&] { wait(left, failed); });
      if (!under_way_) return true;
      std::this_thread::sleep_for(kHasEnded);
    } while (Sleeper::Clock::now() < deadline);
    return false;
  }

 private:
  // Whether they have ended. Throws StatusError if one failed.
  bool has_ended(std::size_t& failed) {
    if (runs_.size() == 1) {
      try {
        if (!is_end(runs_.front().state())) return false;
        runs_.front().wait2(kHasEnded);
        return true;
      } catch (const xrt::run::command_error& error) {
        under_way_ = false;
        failed = 0;
        throw failure_of(error.get_command_state(), error.what());
      }
    }
    try {
      // Not state(), which does not identify the failed call.
      return list_.poll() != 0;
    } catch (const xrt::runlist::command_error& error) {
      under_way_ = false;
      for (std::size_t i = 0; i < runs_.size(); ++i) {
        if (runs_[i].get_handle() == error.get_run().get_handle()) failed = i;
      }
      throw failure_of(error.get_command_state(), error.what());
    }
  }

  // Throws StatusError if the device is gone. A driver without its device refuses every request;
  // the smallest request is for a page.
  void require_device() const {
    constexpr std::size_t kPage = 4096;
    try {
      const xrt::ext::bo asked(context_->device, kPage);
    } catch (const std::system_error& error) {
      if (status_of(std::abs(error.code().value()), Stage::kWait) != Status::kNoDevice) return;
      throw StatusError(Status::kNoDevice, std::string("the NPU is gone: ") + error.what());
    }
  }

  std::shared_ptr<Context> context_;
  std::vector<std::shared_ptr<Instructions>> instructions_;
  std::vector<xrt::bo> buffers_;
  std::vector<xrt::run> runs_;
  xrt::runlist list_;
  std::size_t word_bytes_ = 0;
  bool under_way_ = false;
};

struct Abandoned {
  std::mutex mutex;
  std::vector<std::unique_ptr<Submission>> submissions;
};

// Never destroyed: XRT would end the process at exit.
Abandoned& abandoned() {
  static auto* instance = new Abandoned;
  return *instance;
}

// Frees a submission after its end, or keeps it if the driver's watchdog does not end it.
void free_or_abandon(std::unique_ptr<Submission> submission) noexcept {
  if (submission->ends_within(watchdog_patience())) return;
  const std::lock_guard lock(abandoned().mutex);
  abandoned().submissions.push_back(std::move(submission));
}

}  // namespace

void free_abandoned() noexcept {
  const std::lock_guard lock(abandoned().mutex);
  std::erase_if(abandoned().submissions, [](const std::unique_ptr<Submission>& submission) {
    return submission->ends_within(std::chrono::milliseconds(1));
  });
}

Status run(Array* array, const Call* calls, std::size_t count, std::uint32_t milliseconds,
           Outcome* outcome, Text error) noexcept {
  std::unique_ptr<Submission> submission;
  Status status = guard(Stage::kSubmit, error, [&] {
    free_abandoned();
    if (count == 0) throw StatusError(Status::kSubmit, "expected calls, got none");
    submission = std::make_unique<Submission>(array->context, std::span(calls, count));
    outcome->word_bytes = submission->word_bytes();
    submission->start();
    outcome->accepted = true;
  });
  if (outcome->accepted) {
    status = guard(Stage::kWait, error, [&] {
      submission->wait(std::chrono::milliseconds(milliseconds), outcome->failed);
    });
  }
  if (submission != nullptr) free_or_abandon(std::move(submission));
  return status;
}

}  // namespace flownpu::npu::xrt_abi
