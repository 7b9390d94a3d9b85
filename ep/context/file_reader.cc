// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ep/context/file.h"
#include "ep/context/file_format.h"
#include "ep/model/mapped_file.h"
#include "ops/error.h"
#include "ops/formats/utf8.h"

namespace flownpu {
namespace {

using namespace context_file;  // NOLINT(google-build-using-namespace): the file's format

// Throws Error with a part of the message "<file> cannot be read as a compiled partition: <part>;
// compile the model again".
template <typename... Pieces>
[[noreturn]] void damaged(const Pieces&... pieces) {
  fail("its head is damaged: ", pieces...);
}

// Reads numbers and texts one after the other; every count is checked against the bytes that are
// left.
class HeadReader {
 public:
  explicit HeadReader(std::span<const std::byte> head) : head_(head) {}

  std::int64_t number() {
    if (head_.size() - at_ < 8) damaged("it ends in a number");
    std::uint64_t value = 0;
    for (int byte = 0; byte < 8; ++byte)
      value |= std::to_integer<std::uint64_t>(head_[at_ + byte]) << (8 * byte);
    at_ += 8;
    return static_cast<std::int64_t>(value);
  }
  // A number from 0 to `last`; `what` names it in messages.
  std::int64_t number(std::int64_t last, const char* what) {
    const std::int64_t value = number();
    if (value < 0 || value > last) damaged("expected ", what, " of 0 to ", last, ", got ", value);
    return value;
  }
  // The number of items that follow, each of at least one byte.
  std::size_t count() {
    const std::int64_t value = number();
    if (value < 0 || static_cast<std::size_t>(value) > head_.size() - at_)
      damaged("expected at most ", head_.size() - at_, " more items, got ", value);
    return static_cast<std::size_t>(value);
  }
  float real() {
    const auto bits = static_cast<std::uint32_t>(
        number(std::numeric_limits<std::uint32_t>::max(), "the bits of a number"));
    float value = 0;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  std::string text() {
    const std::size_t size = count();
    std::string value(reinterpret_cast<const char*>(head_.data() + at_), size);
    at_ += size;
    if (!is_utf8(value)) damaged("'", value, "' is no UTF-8");
    return value;
  }
  template <typename Read>
  auto list(const Read& read) {
    std::vector<decltype(read())> items;
    for (std::size_t left = count(); left > 0; --left) items.push_back(read());
    return items;
  }
  bool at_end() const { return at_ == head_.size(); }

 private:
  std::span<const std::byte> head_;
  std::size_t at_ = 0;
};

Attribute read_attribute(HeadReader& head) {
  switch (head.number(4, "a kind of attribute")) {
    case 0:
      return head.number();
    case 1:
      return head.real();
    case 2:
      return head.text();
    case 3:
      return head.list([&] { return head.number(); });
    default:
      return head.list([&] { return head.real(); });
  }
}

// A shape, with -1 for unknown dimensions, whose size in bytes does not overflow.
Shape read_shape(HeadReader& head, const Value& value) {
  Shape shape;
  auto bytes = static_cast<std::int64_t>(bytes_of(value.type, Shape()));
  for (auto left = head.number(Shape::kMaxRank, "a rank"); left > 0; --left) {
    const std::int64_t dim = head.number();
    if (dim < -1 || __builtin_mul_overflow(bytes, std::max<std::int64_t>(dim, 1), &bytes))
      damaged("value '", value.name, "' has a dimension of ", dim);
    shape.append(dim);
  }
  return shape;
}

// A value, and the number of its constant's blob, or kNoConstant.
std::pair<Value, std::int64_t> read_value(HeadReader& head) {
  Value value;
  value.name = head.text();
  value.type = static_cast<DataType>(head.number(kDataTypes - 1, "an element type"));
  if (head.number(1, "a flag") != 0) value.shape = read_shape(head, value);
  return {std::move(value), head.number()};
}

class NodeReader {
 public:
  NodeReader(HeadReader& head, std::size_t blobs_begin, std::shared_ptr<const MappedFile> mapping)
      : head_(head), blobs_begin_(blobs_begin), mapping_(std::move(mapping)) {}

  std::vector<Node> read() {
    std::vector<Node> nodes;
    for (std::size_t left = head_.count(); left > 0; --left) nodes.push_back(read_node());
    read_blobs();
    if (!head_.at_end()) damaged("something follows its end");
    std::size_t packed = 0;
    std::size_t constant = 0;
    for (Node& node : nodes) {
      for (Value& value : node.inputs) place(value, constants_[constant++]);
      for (Packed& item : node.packed) place(item, packed_[packed++]);
    }
    return nodes;
  }

 private:
  Node read_node() {
    Node node;
    node.name = head_.text();
    node.op_type = head_.text();
    node.domain = head_.text();
    node.since_version = static_cast<int>(
        head_.number(std::numeric_limits<std::int16_t>::max(), "a version of an operator"));
    for (std::size_t left = head_.count(); left > 0; --left) {
      std::string key = head_.text();
      Attribute attribute = read_attribute(head_);
      const auto [entry, is_new] = node.attributes.emplace(std::move(key), std::move(attribute));
      if (!is_new) damaged("'", node.name, "' has two attributes '", entry->first, "'");
    }
    node.tensor_attributes = head_.list([&] { return head_.text(); });
    for (std::size_t left = head_.count(); left > 0; --left) {
      auto [value, number] = read_value(head_);
      node.inputs.push_back(std::move(value));
      constants_.push_back(number);
    }
    for (std::size_t left = head_.count(); left > 0; --left) {
      auto [value, number] = read_value(head_);
      if (number != kNoConstant) damaged("output '", value.name, "' is a constant");
      node.outputs.push_back(std::move(value));
    }
    for (std::size_t left = head_.count(); left > 0; --left) {
      node.packed.push_back({.name = head_.text(), .bytes = 0, .write = nullptr});
      packed_.push_back(head_.number());
    }
    if (node.tensor_attributes.size() > node.inputs.size())
      damaged("'", node.name, "' has fewer inputs than attributes among them");
    return node;
  }

  void read_blobs() {
    const std::span<const std::byte> file = mapping_->bytes();
    std::size_t end = blobs_begin_;
    for (std::size_t left = head_.count(); left > 0; --left) {
      const auto bytes = static_cast<std::size_t>(head_.number());
      const std::size_t begin = aligned(end);
      if (begin > file.size() || bytes > file.size() - begin)
        fail("it ends before its constants do");
      blobs_.push_back(file.subspan(begin, bytes));
      end = begin + bytes;
    }
    if (end != file.size()) fail("it goes on after its constants");
  }

  std::span<const std::byte> blob(std::int64_t number) const {
    if (number < 0 || static_cast<std::size_t>(number) >= blobs_.size())
      damaged("expected one of ", blobs_.size(), " constants, got number ", number);
    return blobs_[static_cast<std::size_t>(number)];
  }
  void place(Value& value, std::int64_t number) const {
    if (number == kNoConstant) return;
    const std::span<const std::byte> data = blob(number);
    const auto is_unknown = [](std::int64_t dim) { return dim < 0; };
    if (value.name.empty() || !value.shape || std::ranges::any_of(*value.shape, is_unknown))
      damaged("the constant '", value.name, "' has no name, or a shape that is not known");
    const std::size_t bytes = value.bytes();
    if (data.size() != bytes)
      damaged("expected ", bytes, " bytes of constant '", value.name, "', got ", data.size());
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
  std::size_t blobs_begin_;
  std::shared_ptr<const MappedFile> mapping_;
  std::vector<std::span<const std::byte>> blobs_;
  std::vector<std::int64_t> constants_;  // blob numbers of all nodes' inputs, in order
  std::vector<std::int64_t> packed_;
};

// Checks that all uses of a value agree: a value is an input of the partition, a constant, or the
// output of one node that comes before its readers, with the same type everywhere. Steps rely on
// this, because each is prepared from its own node.
class ValueCheck {
 public:
  void inputs(const Node& context) {
    for (const Value& value : context.inputs) {
      if (!value.name.empty()) known_.emplace(value.name, &value);
    }
  }

  void nodes(const std::vector<Node>& nodes) {
    for (const Node& node : nodes) {
      for (const Value& value : node.inputs) {
        if (value.name.empty()) continue;
        const auto [known, is_new] = known_.emplace(value.name, &value);
        if (is_new && value.constant == nullptr)
          damaged(to_string(node), " reads '", value.name, "', which nothing has made by then");
        if (!is_new) same(value, *known->second);
      }
      for (const Value& value : node.outputs) {
        if (!value.name.empty() && !known_.emplace(value.name, &value).second)
          damaged(to_string(node), " makes '", value.name, "', which is there already");
      }
    }
  }

  void outputs(const Node& context) const {
    for (const Value& value : context.outputs) {
      if (value.name.empty()) continue;
      const auto known = known_.find(value.name);
      if (known == known_.end()) damaged("nothing makes the partition's output '", value.name, "'");
      same(*known->second, value);
    }
  }

 private:
  static void same(const Value& value, const Value& known) {
    if (value.type != known.type) {
      damaged("'", value.name, "' is ", name_of(value.type), " here and ", name_of(known.type),
              " there");
    }
    if (value.constant != known.constant ||
        (value.constant != nullptr && value.shape != known.shape))
      damaged("'", value.name, "' is one constant here and another there");
  }

  std::unordered_map<std::string_view, const Value*> known_;
};

struct Begin {
  std::string identity;
  std::span<const std::byte> head;
};

// The beginning of a file, after the head's sum has been checked.
Begin read_begin(std::span<const std::byte> file) {
  HeadReader begin(file.first(std::min(file.size(), kHeadBegin)));
  if (static_cast<std::uint64_t>(begin.number()) != kMagic) fail("it is no such file");
  if (const std::int64_t version = begin.number(); version != kVersion)
    fail("it is of version ", version, ", expected ", kVersion);
  const auto head_bytes = static_cast<std::uint64_t>(begin.number());
  const auto identity = static_cast<std::uint64_t>(begin.number());
  const auto sum = static_cast<std::uint64_t>(begin.number());
  if (head_bytes > file.size() - kHeadBegin) fail("it ends in its head");
  const std::span<const std::byte> head = file.subspan(kHeadBegin, head_bytes);
  if (sum_of(file.subspan(kSummedBegin, kSummedBytes), head) != sum) damaged("its sum is another");
  return {.identity = to_text(identity), .head = head};
}

}  // namespace

ContextFile read_context_file(const std::string& path, const Node& context,
                              const std::string& identity) {
  const auto mapping = MappedFile::shared(path);
  std::string found;
  try {
    const Begin begin = read_begin(mapping->bytes());
    found = begin.identity;
    if (found == identity) {
      HeadReader head(begin.head);
      ContextFile file;
      file.compatibility = head.text();
      file.nodes = NodeReader(head, kHeadBegin + begin.head.size(), mapping).read();
      ValueCheck check;
      check.inputs(context);
      check.nodes(file.nodes);
      check.outputs(context);
      return file;
    }
  } catch (const Error& error) {
    fail("[FlowNPU] '", path, "' cannot be read as a compiled partition: ", error.what(),
         "; compile the model again");
  }
  fail("[FlowNPU] '", path, "' is another model's partition: expected ",
       identity.empty() ? "one of a model that FlowNPU compiled since version 3 of this file"
                        : identity,
       ", got ", found, "; copy the file that was written with the model, name the model with ",
       "ep.context_file_path if it is in another folder, or compile it again");
}

}  // namespace flownpu
