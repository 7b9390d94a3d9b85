// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <new>
#include <system_error>
#include <utility>
#include <vector>

#include "aie/emulator/emulator.h"
#include "ops/npu/driver/runtimes.h"
#include "ops/system/library.h"
#include "ops/system/memory.h"
#include "ops/system/paths.h"

namespace flownpu::npu {
namespace {

GuardedPages allocate_pages(std::size_t bytes) {
  try {
    return GuardedPages(bytes);
  } catch (const std::bad_alloc&) {
    fail_device(Failure::kMemory, "expected a buffer of ", bytes,
                " bytes, there is no memory for it; use a shorter context, or a smaller model");
  }
}

class EmulatedBuffer final : public Buffer {
 public:
  EmulatedBuffer(std::size_t bytes, std::shared_ptr<Counters> counters)
      : size_(bytes),
        host_(allocate_pages(bytes)),
        device_(allocate_pages(bytes)),
        counters_(std::move(counters)) {
    counters_->buffer_bytes += size_;
  }
  EmulatedBuffer(const EmulatedBuffer&) = delete;
  EmulatedBuffer& operator=(const EmulatedBuffer&) = delete;
  ~EmulatedBuffer() override { counters_->buffer_bytes -= size_; }

  std::span<std::byte> bytes() override { return {host_.data(), size_}; }
  std::span<std::byte> device() { return {device_.data(), size_}; }

  void to_device(std::size_t offset, std::size_t bytes) override {
    move(device_, host_, offset, bytes);
    counters_->bytes_to_device += bytes;
  }
  void to_host(std::size_t offset, std::size_t bytes) override {
    move(host_, device_, offset, bytes);
    counters_->bytes_to_host += bytes;
  }

 private:
  void move(const GuardedPages& to, const GuardedPages& from, std::size_t offset,
            std::size_t bytes) const {
    if (offset > size_ || bytes > size_ - offset) {
      fail("[FlowNPU] expected to move bytes of a buffer of ", size_, ", got ", offset, "..",
           offset + bytes);
    }
    if (bytes > 0) std::memcpy(to.data() + offset, from.data() + offset, bytes);
  }

  std::size_t size_;
  GuardedPages host_;
  GuardedPages device_;
  std::shared_ptr<Counters> counters_;
};

class EmulatedArray;

// The words, and the sequence that they encode. The sequence is decoded again after a word changes.
class EmulatedSequence final : public Sequence {
 public:
  EmulatedSequence(const EmulatedArray& array, std::span<const std::int64_t> words)
      : array_(&array),
        words_(words.begin(), words.end()),
        unsent_(words.size()),
        program_(emulator::read_sequence(words_)) {}

  void write(std::size_t word, std::int64_t value) override {
    if (word >= words_.size()) {
      fail("[FlowNPU] sequence ", program_.name, " has ", words_.size(), " words, got word ", word);
    }
    if (words_[word] == value) return;
    words_[word] = value;
    changed_ = true;
    ++unsent_;
  }

  const EmulatedArray* array() const { return array_; }
  // The sequence that the words encode now. Throws words::Error if they encode none.
  const emulator::Sequence& program() {
    if (changed_) program_ = emulator::read_sequence(words_);
    changed_ = false;
    return program_;
  }
  // Bytes of the words that were changed since they were last sent; from now on they count as sent.
  std::uint64_t send() { return std::exchange(unsent_, 0) * sizeof(std::int64_t); }

 private:
  const EmulatedArray* array_;
  std::vector<std::int64_t> words_;
  std::uint64_t unsent_;
  bool changed_ = false;
  emulator::Sequence program_;
};

// A call, ready to run.
struct Ready {
  EmulatedSequence* sequence;
  const emulator::Sequence* program;
  std::vector<std::span<std::byte>> buffers;
};

class EmulatedArray final : public Array {
 public:
  EmulatedArray(std::string file, emulator::Array array, const emulator::FindKernel& find_kernel,
                std::shared_ptr<Counters> counters)
      : file_(std::move(file)),
        identity_(array.identity),
        emulator_(std::move(array), find_kernel),
        counters_(std::move(counters)) {}

  std::unique_ptr<Sequence> sequence(std::span<const std::int64_t> words) override {
    try {
      auto sequence = std::make_unique<EmulatedSequence>(*this, words);
      if (sequence->program().identity == identity_) return sequence;
    } catch (const words::Error& error) {
      fail_device(Failure::kArtifact, "words for the array ", file_, ": ", error.what(),
                  "; build the model's artifacts again");
    }
    fail_device(Failure::kArtifact, "expected words for the array ", file_,
                ", got another's; build the model's artifacts again");
  }

  void run(std::span<const Call> calls) {
    const std::scoped_lock lock(mutex_);
    std::vector<Ready> ready;
    ready.reserve(calls.size());
    for (const Call& call : calls) ready.push_back(prepare(call));
    ++counters_->dispatches;
    for (std::size_t i = 0; i < calls.size(); ++i) {
      ++counters_->calls;
      counters_->word_bytes += ready[i].sequence->send();
      try {
        // Waits only after the last call: a dispatch's next call follows without a pause.
        emulator_.run(*ready[i].program, ready[i].buffers,
                      {.seed = 0, .settle = i + 1 == calls.size()});
      } catch (const std::exception& error) {
        fail_device(Failure::kCommand, calls[i].name,
                    ": the array ended with an error: ", error.what(),
                    "; close the session and make it again");
      }
    }
  }

 private:
  // Checks everything before the array begins.
  Ready prepare(const Call& call) {
    const auto refuse = [&](const auto&... pieces) {
      fail_device(Failure::kSubmit, call.name, ": ", pieces...);
    };
    auto& sequence = static_cast<EmulatedSequence&>(*call.sequence);
    if (sequence.array() != this) refuse("expected words for the array ", file_, ", got another's");
    Ready ready{&sequence, nullptr, {}};
    try {
      ready.program = &sequence.program();
    } catch (const words::Error& error) {
      refuse("its words were changed, and make no sequence: ", error.what());
    }
    const auto& expected = ready.program->buffers;
    if (expected.size() != call.arguments.size())
      refuse("expected ", expected.size(), " buffers, got ", call.arguments.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const View& view = call.arguments[i];
      const std::span<std::byte> device = static_cast<EmulatedBuffer&>(*view.buffer).device();
      if (view.bytes != expected[i].bytes || view.offset % kDmaWord != 0 ||
          view.offset > device.size() || view.bytes > device.size() - view.offset) {
        refuse("expected for buffer ", expected[i].name, " ", expected[i].bytes,
               " bytes from a multiple of ", kDmaWord, ", got ", view.bytes, " from byte ",
               view.offset, " of ", device.size());
      }
      ready.buffers.push_back(device.subspan(view.offset, view.bytes));
    }
    return ready;
  }

  std::string file_;
  std::int64_t identity_;
  std::mutex mutex_;  // guards emulator_
  emulator::Emulator emulator_;
  std::shared_ptr<Counters> counters_;
};

class EmulatedRuntime final : public Runtime {
 public:
  EmulatedRuntime(std::string target, const aie_host::KernelTable& kernels)
      : target_(std::move(target)), find_kernel_(emulator::kernels_of(kernels)) {}

  std::string description() const override { return target_ + ", emulated"; }

  std::shared_ptr<npu::Array> load(const std::string& file) override {
    try {
      emulator::Array array = emulator::read_array(words::read_words(path_of(file)));
      if (array.target != target_) {
        throw words::Error("expected an array of " + target_ + ", got one of " + array.target);
      }
      return std::make_shared<EmulatedArray>(file, std::move(array), find_kernel_, counters_);
    } catch (const words::Error& error) {
      fail_device(Failure::kArtifact, file, ": ", error.what(),
                  "; build the model's artifacts again");
    }
  }

  std::unique_ptr<Buffer> allocate(std::size_t bytes) override {
    return std::make_unique<EmulatedBuffer>(bytes, counters_);
  }

  void run(npu::Array& array, std::span<const Call> calls,
           std::chrono::milliseconds /*limit*/) override {
    static_cast<EmulatedArray&>(array).run(calls);
  }

  Counts counts() const override { return counters_->read(); }

 private:
  std::string target_;
  emulator::FindKernel find_kernel_;
  std::shared_ptr<Counters> counters_ = std::make_shared<Counters>();
};

}  // namespace

std::unique_ptr<Runtime> open_emulated_runtime(const std::string& target,
                                               const std::string& kernels) {
  if (target != "npu1" && target != "npu2")
    fail_device(Failure::kArtifact, "expected artifacts of npu1 or npu2, got those of ", target);
  const std::filesystem::path folder = kernels.empty() ? own_folder() : path_of(kernels);
  const std::filesystem::path library =
      folder / library_file(target == "npu2" ? "flownpu_aie_xdna2" : "flownpu_aie_xdna");
  try {
    return std::make_unique<EmulatedRuntime>(target, emulator::load_kernels(library));
  } catch (const words::Error& error) {
    fail_device(Failure::kNoDevice, "expected the NPU's kernels, compiled for this machine, in ",
                utf8_of(library), ": ", error.what(),
                "; install FlowNPU again, which brings them along");
  }
}

}  // namespace flownpu::npu
