// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <utility>
#include <vector>

#include "ops/npu/driver/runtimes.h"
#include "ops/npu/driver/xrt_abi.h"
#include "ops/npu/driver/xrt_plugin.h"
#include "ops/system/forks.h"

namespace flownpu::npu {
namespace {

using xrt_abi::Status;

// The plugin's table and the counters. All objects of the runtime share them, and may outlive it. A
// forked child can neither use nor free them: it would free the parent's, because both have the
// same open file.
class Connection {
 public:
  explicit Connection(const xrt_abi::Table& plugin) : table_(plugin) {}

  // Throws DeviceError in a process that was forked since the device was opened.
  const xrt_abi::Table& table() const {
    if (forks() != forks_) throw DeviceError(Failure::kForked, forked_text("npu"));
    return table_;
  }
  template <typename Handle>
  void free(void (*xrt_abi::Table::*function)(Handle*), Handle* handle) const {
    if (forks() == forks_) (table_.*function)(handle);
  }
  // The message needs the versions if one of them is too old.
  std::string versions(Status status) const {
    return status == Status::kTooOld ? " on " + description : "";
  }

  std::string description;
  Counters counters;

 private:
  const xrt_abi::Table& table_;
  std::uint32_t forks_ = forks();
};

class XrtBuffer final : public Buffer {
 public:
  XrtBuffer(std::shared_ptr<Connection> connection, xrt_abi::Device* device, std::size_t size)
      : connection_(std::move(connection)), size_(size) {
    ErrorText error;
    void* host = nullptr;
    error.check(connection_->table().make_buffer(device, size, &handle_, &host, error.text()),
                "a buffer of " + std::to_string(size) + " bytes on the NPU");
    host_ = static_cast<std::byte*>(host);
    connection_->counters.buffer_bytes += size_;
  }
  ~XrtBuffer() override {
    connection_->counters.buffer_bytes -= size_;
    connection_->free(&xrt_abi::Table::free_buffer, handle_);
  }
  XrtBuffer(const XrtBuffer&) = delete;
  XrtBuffer& operator=(const XrtBuffer&) = delete;

  std::span<std::byte> bytes() override { return {host_, size_}; }
  void to_device(std::size_t offset, std::size_t bytes) override {
    move(xrt_abi::Direction::kToDevice, offset, bytes, connection_->counters.bytes_to_device);
  }
  void to_host(std::size_t offset, std::size_t bytes) override {
    move(xrt_abi::Direction::kToHost, offset, bytes, connection_->counters.bytes_to_host);
  }
  xrt_abi::Buffer* handle() const { return handle_; }

 private:
  void move(xrt_abi::Direction direction, std::size_t offset, std::size_t bytes,
            std::atomic<std::uint64_t>& count) {
    if (offset > size_ || bytes > size_ - offset) {
      fail("[FlowNPU] expected to move bytes of a buffer of ", size_, ", got ", offset, "..",
           offset + bytes);
    }
    if (bytes == 0) return;
    ErrorText error;
    error.check(connection_->table().move(handle_, direction, offset, bytes, error.text()),
                "a transfer of " + std::to_string(bytes) + " bytes");
    count += bytes;
  }

  std::shared_ptr<Connection> connection_;
  std::size_t size_;
  xrt_abi::Buffer* handle_ = nullptr;
  std::byte* host_ = nullptr;
};

// A 32-bit word of the controller. The artifacts keep words in 64 bits, the size of the emulator's
// words.
std::uint32_t word_of(std::int64_t value) {
  if (value < 0 || value > std::numeric_limits<std::uint32_t>::max()) {
    fail_device(Failure::kArtifact, "expected instructions of 32 bits for the NPU, got ", value,
                "; build the designs with `flownpu build MODEL --for xclbin`");
  }
  return static_cast<std::uint32_t>(value);
}

// An array in the plugin. Its sequences keep it alive.
class XrtArray final : public Array, public std::enable_shared_from_this<XrtArray> {
 public:
  XrtArray(std::shared_ptr<Connection> connection, xrt_abi::Device* device, std::string file)
      : connection_(std::move(connection)), file_(std::move(file)) {
    ErrorText error;
    error.check(connection_->table().load_array(device, file_.c_str(), &handle_, &most_buffers_,
                                                error.text()),
                file_ + " on " + connection_->description);
  }
  ~XrtArray() override { connection_->free(&xrt_abi::Table::free_array, handle_); }
  XrtArray(const XrtArray&) = delete;
  XrtArray& operator=(const XrtArray&) = delete;

  std::unique_ptr<Sequence> sequence(std::span<const std::int64_t> words) override;
  std::size_t most_buffers() const override { return most_buffers_; }
  Connection& connection() const { return *connection_; }
  const std::string& file() const { return file_; }
  xrt_abi::Array* handle() const { return handle_; }

 private:
  std::shared_ptr<Connection> connection_;
  std::string file_;
  xrt_abi::Array* handle_ = nullptr;
  std::size_t most_buffers_ = 0;
};

class XrtSequence final : public Sequence {
 public:
  XrtSequence(std::shared_ptr<XrtArray> array, std::span<const std::int64_t> words)
      : array_(std::move(array)), size_(words.size()) {
    std::vector<std::uint32_t> narrow(words.size());
    std::transform(words.begin(), words.end(), narrow.begin(), word_of);
    ErrorText error;
    const Status status = array_->connection().table().make_sequence(
        array_->handle(), narrow.data(), narrow.size(), &handle_, error.text());
    error.check(status,
                "words for the array " + array_->file() + array_->connection().versions(status));
  }
  ~XrtSequence() override { array_->connection().free(&xrt_abi::Table::free_sequence, handle_); }
  XrtSequence(const XrtSequence&) = delete;
  XrtSequence& operator=(const XrtSequence&) = delete;

  void write(std::size_t word, std::int64_t value) override {
    if (word >= size_) fail("[FlowNPU] a sequence has ", size_, " words, got word ", word);
    ErrorText error;
    error.check(
        array_->connection().table().write_word(handle_, word, word_of(value), error.text()),
        "word " + std::to_string(word) + " of a sequence");
  }
  const XrtArray* array() const { return array_.get(); }
  xrt_abi::Sequence* handle() const { return handle_; }

 private:
  std::shared_ptr<XrtArray> array_;
  std::size_t size_;
  xrt_abi::Sequence* handle_ = nullptr;
};

std::unique_ptr<Sequence> XrtArray::sequence(std::span<const std::int64_t> words) {
  return std::make_unique<XrtSequence>(shared_from_this(), words);
}

// A call in the plugin's form; its arguments go into `views`, which must outlive it.
xrt_abi::Call flatten(const Call& call, const XrtArray& array, std::vector<xrt_abi::View>& views) {
  auto& sequence = static_cast<XrtSequence&>(*call.sequence);
  if (sequence.array() != &array) {
    fail_device(Failure::kSubmit, call.name, ": expected words for the array ", array.file(),
                ", got another's");
  }
  if (call.arguments.size() > array.most_buffers()) {
    fail_device(Failure::kSubmit, call.name, ": the array ", array.file(), " takes ",
                array.most_buffers(), " buffers, and the call has ", call.arguments.size());
  }
  for (const View& view : call.arguments) {
    auto& buffer = static_cast<XrtBuffer&>(*view.buffer);
    const std::size_t size = buffer.bytes().size();
    if (view.bytes == 0 || view.offset % kDmaWord != 0 || view.offset > size ||
        view.bytes > size - view.offset) {
      fail_device(Failure::kSubmit, call.name, ": expected bytes of a buffer of ", size,
                  " from a multiple of ", kDmaWord, ", got ", view.bytes, " from byte ",
                  view.offset);
    }
    views.push_back({buffer.handle(), view.offset, view.bytes});
  }
  return {sequence.handle(), views.data(), views.size()};
}

// The name of the call with this number, or of all calls, if XRT does not know which it was.
std::string name_of(std::span<const Call> calls, std::size_t number, const XrtArray& array) {
  if (calls.empty()) return array.file();
  if (number < calls.size()) return calls[number].name;
  return calls.size() == 1 ? calls.front().name : calls.front().name + " .. " + calls.back().name;
}

class XrtRuntime final : public Runtime {
 public:
  explicit XrtRuntime(const xrt_abi::Table& table)
      : connection_(std::make_shared<Connection>(table)) {
    ErrorText error;
    std::array<char, 256> description{};
    error.check(table.open_device(&device_, {description.data(), description.size()}, error.text()),
                "device 'npu'");
    connection_->description = description.data();
  }
  ~XrtRuntime() override { connection_->free(&xrt_abi::Table::free_device, device_); }
  XrtRuntime(const XrtRuntime&) = delete;
  XrtRuntime& operator=(const XrtRuntime&) = delete;

  std::string description() const override { return connection_->description; }
  std::shared_ptr<Array> load(const std::string& file) override {
    return std::make_shared<XrtArray>(connection_, device_, file);
  }
  std::unique_ptr<Buffer> allocate(std::size_t bytes) override {
    return std::make_unique<XrtBuffer>(connection_, device_, bytes);
  }
  void run(Array& array, std::span<const Call> calls, std::chrono::milliseconds limit) override {
    const auto& on = static_cast<XrtArray&>(array);
    std::vector<std::vector<xrt_abi::View>> views(calls.size());
    std::vector<xrt_abi::Call> flat;
    flat.reserve(calls.size());
    for (std::size_t i = 0; i < calls.size(); ++i) flat.push_back(flatten(calls[i], on, views[i]));
    // XRT takes 0 for no limit.
    const auto milliseconds =
        std::clamp<std::int64_t>(limit.count(), 1, std::numeric_limits<std::int32_t>::max());
    ErrorText error;
    xrt_abi::Outcome outcome{.accepted = false, .word_bytes = 0, .failed = calls.size()};
    const Status status =
        connection_->table().run(on.handle(), flat.data(), flat.size(),
                                 static_cast<std::uint32_t>(milliseconds), &outcome, error.text());
    if (outcome.accepted) {
      connection_->counters.dispatches += 1;
      connection_->counters.calls += flat.size();
      connection_->counters.word_bytes += outcome.word_bytes;
    }
    error.check(status, name_of(calls, outcome.failed, on) + connection_->versions(status));
  }
  Counts counts() const override { return connection_->counters.read(); }

 private:
  std::shared_ptr<Connection> connection_;
  xrt_abi::Device* device_ = nullptr;
};

}  // namespace

std::unique_ptr<Runtime> open_xrt_runtime(const std::string& plugin) {
  return std::make_unique<XrtRuntime>(load_xrt_plugin(plugin));
}

}  // namespace flownpu::npu
