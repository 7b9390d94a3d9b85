// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

#include "ep/context/file.h"
#include "ep/context/file_format.h"
#include "ops/error.h"
#include "ops/formats/utf8.h"
#include "ops/system/new_file.h"
#include "ops/system/paths.h"

namespace flownpu {
namespace {

using namespace context_file;  // NOLINT(google-build-using-namespace): the file's format

struct Blob {
  std::size_t bytes = 0;
  const void* data = nullptr;      // a constant's bytes, or null and
  const Packed* packed = nullptr;  // data that writes itself
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
    if (!is_utf8(value)) {
      fail(
          "[FlowNPU] a compiled partition is kept with its texts in UTF-8, as ONNX has them; got '",
          value, "': export the model again");
    }
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
    list(node.tensor_attributes, [this](const std::string& name) { text(name); });
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

  // The number of the constant's blob. Values may share one (a table that is embedding and LM
  // head).
  std::int64_t constant(const Value& value) {
    const auto [known, is_new] = numbers_.try_emplace(value.constant, blobs.size());
    if (is_new) {
      const std::size_t bytes = bytes_of(value.type, value.shape.value_or(Shape()));
      blobs.push_back({.bytes = bytes, .data = value.constant, .packed = nullptr});
    }
    return static_cast<std::int64_t>(known->second);
  }

  std::string head_;
  std::map<const void*, std::size_t> numbers_;
};

// The fields that precede the head.
std::string begin_of(std::uint64_t identity, const std::string& head) {
  HeadWriter begin;
  begin.number(kMagic);
  begin.number(kVersion);
  begin.number(head.size());
  begin.number(identity);
  const auto summed = std::as_bytes(std::span(begin.head())).subspan(kSummedBegin);
  begin.number(sum_of(summed, std::as_bytes(std::span(head))));
  return begin.head();
}

}  // namespace

std::string write_context_file(const std::string& path, const std::string& compatibility,
                               const std::vector<Node>& nodes) {
  HeadWriter writer;
  writer.text(compatibility);
  writer.list(nodes, [&](const Node& node) { writer.node(node); });
  writer.list(writer.blobs, [&](const Blob& blob) { writer.number(blob.bytes); });

  NewFile file(path_of(path));
  const std::hash<std::string_view> hash;
  HeadWriter hashes;
  hashes.number(hash(writer.head()));
  file.content() << std::string(kHeadBegin, '\0') << writer.head();
  std::vector<std::byte> memory;
  for (const Blob& blob : writer.blobs) {
    const auto at = static_cast<std::size_t>(file.content().tellp());
    file.content() << std::string(aligned(at) - at, '\0');
    const auto* data = static_cast<const char*>(blob.data);
    if (blob.packed != nullptr) {
      memory.resize(blob.bytes);
      blob.packed->write(memory);
      data = reinterpret_cast<const char*>(memory.data());
    }
    file.content().write(data, static_cast<std::streamsize>(blob.bytes));
    hashes.number(hash({data, blob.bytes}));
  }
  const std::uint64_t identity = hash(hashes.head());

  file.content().seekp(0) << begin_of(identity, writer.head());
  if (const std::string problem = file.finish(); !problem.empty())
    fail("[FlowNPU] cannot write the compiled partition '", path, "': ", problem);
  return to_text(identity);
}

}  // namespace flownpu
