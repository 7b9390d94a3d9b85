// SPDX-License-Identifier: Apache-2.0
#include "ep/context_file.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <variant>

#include "ep/mapped_file.h"
#include "ops/error.h"

namespace flownpu {
namespace {

constexpr std::uint64_t kMagic = 0x4355504E776F6C46;  // "FlowNPUC", little-endian
constexpr std::uint64_t kVersion = 1;
constexpr std::size_t kHeadBegin = 3 * sizeof(std::uint64_t);
constexpr std::size_t kAlignment = 4096;
constexpr std::int64_t kNoConstant = -1;

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// --- Writing -----------------------------------------------------------------------------------

struct Blob {
  std::size_t bytes = 0;
  const void* data = nullptr;      // a constant's; null for what is packed:
  const Packed* packed = nullptr;  // it writes itself
};

class HeadWriter {
 public:
  template <typename Number>
  void number(Number value) {
    const auto wide = static_cast<std::uint64_t>(static_cast<std::int64_t>(value));
    for (int byte = 0; byte < 8; ++byte) head_ += static_cast<char>(wide >> (8 * byte));
  }
  void real(float value) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    number(bits);
  }
  void text(const std::string& value) {
    number(value.size());
    head_ += value;
  }
  template <typename Item, typename Write>
  void list(const Item& items, const Write& write) {
    number(items.size());
    for (const auto& item : items) write(item);
  }

  void node(const Node& node) {
    text(node.name);
    text(node.op_type);
    text(node.domain);
    number(node.since_version);
    list(node.attributes, [this](const auto& entry) { attribute(entry.first, entry.second); });
    list(node.inputs, [this](const Value& item) { value(item); });
    list(node.outputs, [this](const Value& item) { value(item); });
    list(node.packed, [this](const Packed& item) {
      text(item.name);
      number(blobs.size());
      blobs.push_back({.bytes = item.bytes, .data = nullptr, .packed = &item});
    });
  }

  const std::string& head() const { return head_; }

  std::vector<Blob> blobs;

 private:
  void attribute(const std::string& key, const Attribute& attribute) {
    text(key);
    number(attribute.index());
    std::visit(
        [this](const auto& held) {
          using Held = std::decay_t<decltype(held)>;
          if constexpr (std::is_same_v<Held, std::string>) {
            text(held);
          } else if constexpr (std::is_same_v<Held, float>) {
            real(held);
          } else if constexpr (std::is_same_v<Held, std::int64_t>) {
            number(held);
          } else if constexpr (std::is_same_v<Held, std::vector<float>>) {
            list(held, [this](float item) { real(item); });
          } else {
            list(held, [this](std::int64_t item) { number(item); });
          }
        },
        attribute);
  }

  void value(const Value& value) {
    text(value.name);
    number(value.type);
    number(value.shape.has_value());
    if (value.shape) {
      number(value.shape->rank());
      for (const std::int64_t dim : *value.shape) number(dim);
    }
    number(value.constant == nullptr ? kNoConstant : constant(value));
  }

  // Its blob's number; several values may be one constant (a table that is embedding and LM head).
  std::int64_t constant(const Value& value) {
    const auto [known, is_new] = numbers_.try_emplace(value.constant, blobs.size());
    if (is_new) {
      const std::size_t bytes =
          static_cast<std::size_t>(value.shape.value_or(Shape()).elements()) * size_of(value.type);
      blobs.push_back({.bytes = bytes, .data = value.constant, .packed = nullptr});
    }
    return static_cast<std::int64_t>(known->second);
  }

  std::string head_;
  std::map<const void*, std::size_t> numbers_;
};

// --- Reading -----------------------------------------------------------------------------------

// Whether a text is UTF-8, as ONNX's names are. Python passes on no message with a name that is
// not.
bool is_utf8(std::string_view text) {
  // The least code points of two, three and four bytes: a shorter one could have been used below.
  constexpr std::uint32_t kLeast[] = {0x80, 0x800, 0x10000};
  for (std::size_t at = 0; at < text.size();) {
    const std::uint32_t first = static_cast<unsigned char>(text[at++]);
    if (first < 0x80) continue;
    if (first < 0xc0 || first > 0xf4) return false;
    const std::size_t following = first < 0xe0 ? 1 : first < 0xf0 ? 2 : 3;
    if (text.size() - at < following) return false;
    std::uint32_t code = first & (0x3fU >> following);
    for (std::size_t i = 0; i < following; ++i, ++at) {
      const std::uint32_t byte = static_cast<unsigned char>(text[at]);
      if ((byte & 0xc0) != 0x80) return false;
      code = code << 6 | (byte & 0x3f);
    }
    const bool surrogate = code >= 0xd800 && code <= 0xdfff;
    if (code < kLeast[following - 1] || code > 0x10ffff || surrogate) return false;
  }
  return true;
}

class HeadReader {
 public:
  explicit HeadReader(std::span<const std::byte> head) : head_(head) {}

  std::int64_t number() {
    if (head_.size() - at_ < 8) damaged();
    std::uint64_t value = 0;
    for (int byte = 0; byte < 8; ++byte)
      value |= std::to_integer<std::uint64_t>(head_[at_ + byte]) << (8 * byte);
    at_ += 8;
    return static_cast<std::int64_t>(value);
  }
  // How many items follow, of a byte or more each.
  std::size_t count() {
    const std::int64_t value = number();
    if (value < 0 || static_cast<std::size_t>(value) > head_.size() - at_) damaged();
    return static_cast<std::size_t>(value);
  }
  float real() {
    const auto bits = static_cast<std::uint32_t>(number());
    float value = 0;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  std::string text() {
    const std::size_t size = count();
    std::string value(reinterpret_cast<const char*>(head_.data() + at_), size);
    at_ += size;
    if (!is_utf8(value)) damaged();
    return value;
  }
  template <typename Read>
  auto list(const Read& read) {
    std::vector<decltype(read())> items;
    for (std::size_t left = count(); left > 0; --left) items.push_back(read());
    return items;
  }
  bool at_end() const { return at_ == head_.size(); }
  [[noreturn]] static void damaged() { fail("its head is damaged"); }

 private:
  std::span<const std::byte> head_;
  std::size_t at_ = 0;
};

Attribute read_attribute(HeadReader& head) {
  switch (head.number()) {
    case 0:
      return head.number();
    case 1:
      return head.real();
    case 2:
      return head.text();
    case 3:
      return head.list([&] { return head.number(); });
    case 4:
      return head.list([&] { return head.real(); });
    default:
      HeadReader::damaged();
  }
}

// A value, and the number of its constant.
std::pair<Value, std::int64_t> read_value(HeadReader& head) {
  Value value;
  value.name = head.text();
  const std::int64_t type = head.number();
  if (type < 0 || type > static_cast<std::int64_t>(DataType::kBool)) HeadReader::damaged();
  value.type = static_cast<DataType>(type);
  if (head.number() != 0) {
    const std::vector<std::int64_t> dims = head.list([&] { return head.number(); });
    value.shape = Shape(dims.data(), dims.size());
  }
  return {std::move(value), head.number()};
}

class NodeReader {
 public:
  NodeReader(HeadReader& head, std::shared_ptr<const MappedFile> mapping)
      : head_(head), mapping_(std::move(mapping)) {}

  void read(std::vector<Node>& nodes) {
    for (std::size_t left = head_.count(); left > 0; --left) read_node(nodes.emplace_back());
    for (std::size_t left = head_.count(); left > 0; --left) {
      const auto offset = static_cast<std::uint64_t>(head_.number());
      const auto bytes = static_cast<std::uint64_t>(head_.number());
      const std::size_t size = mapping_->bytes().size();
      if (offset > size || bytes > size - offset) fail("it ends before its constants do");
      blobs_.push_back(mapping_->bytes().subspan(offset, bytes));
    }
    if (!head_.at_end()) HeadReader::damaged();
    std::size_t packed = 0;
    std::size_t constant = 0;
    for (Node& node : nodes) {
      for (Value& value : node.inputs) place(value, constants_[constant++]);
      for (Packed& item : node.packed) place(item, packed_[packed++]);
    }
  }

 private:
  void read_node(Node& node) {
    node.name = head_.text();
    node.op_type = head_.text();
    node.domain = head_.text();
    node.since_version = static_cast<int>(head_.number());
    for (std::size_t left = head_.count(); left > 0; --left) {
      std::string key = head_.text();
      node.attributes.emplace(std::move(key), read_attribute(head_));
    }
    for (std::size_t left = head_.count(); left > 0; --left) {
      auto [value, number] = read_value(head_);
      node.inputs.push_back(std::move(value));
      constants_.push_back(number);
    }
    for (std::size_t left = head_.count(); left > 0; --left)
      node.outputs.push_back(read_value(head_).first);
    for (std::size_t left = head_.count(); left > 0; --left) {
      node.packed.push_back({.name = head_.text(), .bytes = 0, .write = nullptr});
      packed_.push_back(head_.number());
    }
  }

  std::span<const std::byte> blob(std::int64_t number) const {
    if (number < 0 || static_cast<std::size_t>(number) >= blobs_.size()) HeadReader::damaged();
    return blobs_[static_cast<std::size_t>(number)];
  }
  void place(Value& value, std::int64_t number) const {
    if (number == kNoConstant) return;
    const std::span<const std::byte> data = blob(number);
    const std::int64_t elements = value.shape.value_or(Shape()).elements();
    if (data.size() / size_of(value.type) != static_cast<std::size_t>(elements))
      HeadReader::damaged();
    value.constant = data.data();
    value.owner = mapping_;
  }
  void place(Packed& packed, std::int64_t number) const {
    const std::span<const std::byte> data = blob(number);
    packed.bytes = data.size();
    packed.write = [data, owner = mapping_](std::span<std::byte> target) {
      std::memcpy(target.data(), data.data(), data.size());
    };
  }

  HeadReader& head_;
  std::shared_ptr<const MappedFile> mapping_;
  std::vector<std::span<const std::byte>> blobs_;
  std::vector<std::int64_t> constants_;  // of all inputs, in order
  std::vector<std::int64_t> packed_;
};

}  // namespace

void write_context_file(const std::string& path, const std::string& compatibility,
                        const std::vector<Node>& nodes) {
  HeadWriter writer;
  writer.text(compatibility);
  writer.list(nodes, [&](const Node& node) { writer.node(node); });
  // The offsets are numbers of fixed width, so the size of the head does not depend on them.
  const std::size_t head_bytes = writer.head().size() + (1 + 2 * writer.blobs.size()) * 8;
  std::size_t offset = aligned(kHeadBegin + head_bytes);
  writer.number(writer.blobs.size());
  for (const Blob& blob : writer.blobs) {
    writer.number(offset);
    writer.number(blob.bytes);
    offset = aligned(offset + blob.bytes);
  }

  const std::string unfinished = path + ".unfinished";
  std::ofstream file(unfinished, std::ios::binary | std::ios::trunc);
  HeadWriter begin;
  for (const std::uint64_t number : {kMagic, kVersion, std::uint64_t{head_bytes}})
    begin.number(number);
  file << begin.head() << writer.head();
  std::vector<std::byte> memory;
  for (const Blob& blob : writer.blobs) {
    const auto at = static_cast<std::size_t>(file.tellp());
    file << std::string(aligned(at) - at, '\0');
    const auto* data = static_cast<const char*>(blob.data);
    if (blob.packed != nullptr) {
      memory.resize(blob.bytes);
      blob.packed->write(memory);
      data = reinterpret_cast<const char*>(memory.data());
    }
    file.write(data, static_cast<std::streamsize>(blob.bytes));
  }
  file.close();
  std::error_code error;
  if (file) std::filesystem::rename(unfinished, path, error);
  if (!file || error) {
    std::filesystem::remove(unfinished, error);
    fail("[FlowNPU] cannot write the compiled partition '", path,
         "': is the disk full, or the folder read-only?");
  }
}

ContextFile read_context_file(const std::string& path) {
  const auto mapping = MappedFile::shared(path);
  const std::span<const std::byte> bytes = mapping->bytes();
  try {
    HeadReader begin(bytes.first(std::min(bytes.size(), kHeadBegin)));
    if (static_cast<std::uint64_t>(begin.number()) != kMagic) fail("it is no such file");
    if (const std::int64_t version = begin.number(); version != kVersion)
      fail("it is of version ", version, ", expected ", kVersion);
    const auto head_bytes = static_cast<std::uint64_t>(begin.number());
    if (head_bytes > bytes.size() - kHeadBegin) fail("it ends in its head");
    HeadReader head(bytes.subspan(kHeadBegin, head_bytes));
    ContextFile file;
    file.compatibility = head.text();
    NodeReader(head, mapping).read(file.nodes);
    return file;
  } catch (const Error& error) {
    fail("[FlowNPU] '", path, "' cannot be read as a compiled partition: ", error.what(),
         "; compile the model again");
  }
}

}  // namespace flownpu
