// SPDX-License-Identifier: Apache-2.0
#include "ops/lowering/weights/repacked_weights.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <iterator>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <thread>
#include <unordered_map>
#include <utility>

#include "ops/error.h"
#include "ops/formats/q4nx_layouts.h"
#include "ops/nodes/q4nx_matmul.h"
#include "ops/system/machine_limits.h"
#include "ops/system/memory.h"

namespace flownpu::lowering {
namespace {

// Value::constant points here until the constant is made; the byte is never read.
constexpr std::byte kToBeMade{};
// The suffixes that exporters and this file append to names of weights.
constexpr std::string_view kCodesSuffix = "_Q4";
constexpr std::string_view kSuffix = "_Q4NX";

// Weights begin on page boundaries, as they do in mapped files. Kernels read whole cache lines, and
// data that begins inside a line would cost one more line.
constexpr std::size_t kAlignment = 4096;
// For larger weights a minimum might become infinite when it is rounded to bf16.
constexpr float kLargestWeight = 0x1p127F;
// The size of a piece of work: it takes some ms, and a vocabulary's table has about a thousand.
constexpr std::int64_t kPieceBytes = std::int64_t{256} << 10;

constexpr std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// Calls work(i) for 0 <= i < count on all cores; rethrows the first exception of a call.
template <typename Work>
void parallel(std::size_t count, const Work& work) {
  std::atomic<std::size_t> next = 0;
  std::atomic<bool> failed = false;
  std::exception_ptr error;
  const auto run = [&] {
    try {
      for (std::size_t i = next++; i < count && !failed; i = next++) work(i);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> others;
    for (int i = usable_processors(); i > 1; --i) others.emplace_back(run);
    run();
  }
  if (error) std::rethrow_exception(error);
}

// Quantises `count` rows of blocks, from `first` on, of a weight of floats. `blocks`: where the
// blocks of the whole weight begin.
Difference pack_floats(const FloatWeight& weight, const float* floats, const q4nx::Layout& layout,
                       std::int64_t first, std::int64_t count, std::byte* blocks) {
  const std::int64_t row_bytes = layout.row_bytes(weight.columns);
  std::memset(blocks + first * row_bytes, 0, static_cast<std::size_t>(count * row_bytes));
  const std::int64_t down = weight.transposed ? 1 : weight.columns;
  const std::int64_t along = weight.transposed ? weight.rows : 1;
  Difference difference;
  std::array<float, kGroupsAtOnce * q4nx::kGroup> groups{};
  std::array<Q4NXGroup, kGroupsAtOnce> made;
  const std::int64_t end = std::min(weight.rows, (first + count) * q4nx::kBlockRows);
  for (std::int64_t row = first * q4nx::kBlockRows; row < end; ++row) {
    for (std::int64_t k = 0; k < weight.columns;) {
      // Takes as many groups of equal size as possible: the last group of a row may be smaller.
      const std::int64_t size = std::min(q4nx::kGroup, weight.columns - k);
      const std::int64_t at_once = std::min(std::ssize(made), (weight.columns - k) / size);
      const auto taken = std::span(groups).first(static_cast<std::size_t>(at_once * size));
      for (std::size_t i = 0; i < taken.size(); ++i) {
        taken[i] = floats[row * down + (k + static_cast<std::int64_t>(i)) * along];
        if (!(std::abs(taken[i]) <= kLargestWeight))
          fail("expected finite weights of at most 2^127, got ", taken[i], " in row ", row);
      }
      const auto found = std::span(made).first(static_cast<std::size_t>(at_once));
      quantize_groups(taken, static_cast<std::size_t>(size), found);
      for (const Q4NXGroup& group : found) {
        put_group(group, row, k, layout, blocks + row / q4nx::kBlockRows * row_bytes);
        k += size;
      }
      for (std::size_t i = 0; i < taken.size(); ++i) {
        const auto width = static_cast<std::size_t>(size);
        const double error = double{made[i / width].weight(i % width)} - double{taken[i]};
        difference.squares += double{taken[i]} * double{taken[i]};
        difference.squared_error += error * error;
      }
    }
  }
  return difference;
}

bool same_bytes(const Value& a, const Value& b) {
  if (a.name.empty() || b.name.empty()) return a.name.empty() && b.name.empty();
  return a.type == b.type && a.bytes() == b.bytes() &&
         (a.constant == b.constant || std::memcmp(a.constant, b.constant, a.bytes()) == 0);
}

// Whether both are the same weight, possibly in two copies: ORT copies a constant when it folds its
// Reshape.
bool same(const QuantizedWeight& a, const QuantizedWeight& b) {
  return a.rows == b.rows && a.columns == b.columns && a.block_size == b.block_size &&
         a.bits == b.bits && a.of_onnx_types == b.of_onnx_types && a.transposed == b.transposed &&
         a.first_row == b.first_row && a.row_step == b.row_step && a.table == b.table &&
         same_bytes(a.scales, b.scales) && same_bytes(a.zero_points, b.zero_points) &&
         same_bytes(a.factors, b.factors) && same_bytes(a.codes, b.codes);
}

// The common first words (each up to a '.') of the names of all products' weights, followed by
// `name`.
std::string joined_name(const std::vector<const Node*>& products, const std::string& name) {
  const std::string& first = products.front()->inputs[kProductWeight].name;
  std::size_t common = 0;
  for (std::size_t end = first.find('.'); end != std::string::npos;
       end = first.find('.', end + 1)) {
    const std::string_view words = std::string_view(first).substr(0, end + 1);
    if (!std::ranges::all_of(products, [&](const Node* product) {
          return product->inputs[kProductWeight].name.starts_with(words);
        })) {
      break;
    }
    common = end + 1;
  }
  return first.substr(0, common) + name;
}

}  // namespace

bool Q4NXConstant::StackedWeight::keeps_codes() const {
  const auto* weight = std::get_if<QuantizedWeight>(&source);
  // Other kinds of weight have no replaced codes.
  return weight == nullptr || weight->keeps_codes();
}

Q4NXConstant::Q4NXConstant(std::vector<StackedWeight> parts)
    : parts_(std::move(parts)), layout_(parts_.front().layout) {
  for (const StackedWeight& part : parts_) {
    if (part.layout == layout_) continue;
    layout_ = layout_.code_bits == 8 ? q4nx::kEightBitsWithMinima : q4nx::kNarrow;
  }
}

Shape Q4NXConstant::shape() const {
  std::int64_t blocks = 0;
  for (const StackedWeight& part : parts_) blocks += q4nx::row_blocks(part.rows);
  return q4nx::blocks_shape(blocks * q4nx::kBlockRows, parts_.front().columns, layout_);
}

bool Q4NXConstant::keeps_codes() const {
  return std::ranges::all_of(parts_, &StackedWeight::keeps_codes);
}

std::vector<Q4NXConstant::Piece> Q4NXConstant::pieces(std::byte* memory, bool measured) const {
  std::vector<Piece> pieces;
  const std::int64_t columns = parts_.front().columns;
  const std::int64_t row_bytes = layout_.row_bytes(columns);
  const std::int64_t at_once = std::max<std::int64_t>(kPieceBytes / row_bytes, 1);
  for (const StackedWeight& part : parts_) {
    const std::int64_t blocks = q4nx::row_blocks(part.rows);
    std::shared_ptr<const float> floats;
    if (const auto* weight = std::get_if<FloatWeight>(&part.source)) floats = weight->read();
    for (std::int64_t first = 0; first < blocks; first += at_once) {
      const std::int64_t count = std::min(at_once, blocks - first);
      const auto pack = [this, &part, memory, first, count, columns, row_bytes, measured, floats] {
        Difference difference;
        if (const auto* weight = std::get_if<QuantizedWeight>(&part.source)) {
          const bool asked = measured || !weight->keeps_codes();
          weight->pack(memory, layout_, first, count, asked ? &difference : nullptr);
          return difference;
        }
        if (floats != nullptr) {
          return pack_floats(std::get<FloatWeight>(part.source), floats.get(), layout_, first,
                             count, memory);
        }
        const auto* from = static_cast<const std::byte*>(std::get<Value>(part.source).constant);
        for (std::int64_t block = first; block < first + count; ++block) {
          q4nx::convert_row(from + block * part.layout.row_bytes(columns), part.layout,
                            memory + block * row_bytes, layout_, columns);
        }
        return difference;
      };
      pieces.push_back({static_cast<std::size_t>(count * row_bytes), pack});
    }
    memory += blocks * row_bytes;
  }
  return pieces;
}

std::vector<Difference> run(const std::vector<Q4NXConstant::Piece>& pieces) {
  std::vector<std::size_t> order(pieces.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order, std::ranges::greater(), [&](std::size_t i) { return pieces[i].bytes; });
  std::vector<Difference> differences(pieces.size());
  parallel(order.size(), [&](std::size_t i) { differences[order[i]] = pieces[order[i]].pack(); });
  return differences;
}

Value RepackedWeights::promise(const std::string& name, Q4NXConstant constant) {
  Value value;
  value.name = name;
  value.type = DataType::kUInt8;
  value.shape = constant.shape();
  value.constant = &kToBeMade;
  constants_.emplace(name, std::move(constant));
  return value;
}

Value RepackedWeights::add(const QuantizedWeight& weight) {
  for (const auto& [name, constant] : constants_) {
    const auto* made = std::get_if<QuantizedWeight>(&constant.parts().front().source);
    if (constant.parts().size() > 1 || made == nullptr || !same(*made, weight)) continue;
    Value value;
    value.name = name;
    value.type = DataType::kUInt8;
    value.shape = constant.shape();
    value.constant = &kToBeMade;
    return value;
  }
  std::string_view name = weight.codes.name;
  if (name.ends_with(kCodesSuffix)) name.remove_suffix(kCodesSuffix.size());
  return promise(graph_.unique_name(std::string(name).append(kSuffix)),
                 Q4NXConstant({{weight, weight.rows, weight.columns, weight.layout()}}));
}

Value RepackedWeights::stack(const std::vector<QuantizedWeight>& weights, const std::string& name) {
  std::vector<Q4NXConstant::StackedWeight> parts;
  parts.reserve(weights.size());
  for (const QuantizedWeight& weight : weights)
    parts.push_back({weight, weight.rows, weight.columns, weight.layout()});
  return promise(graph_.unique_name(name + std::string(kSuffix)), Q4NXConstant(std::move(parts)));
}

void RepackedWeights::take(const std::string& name, Q4NXConstant constant) {
  const Value value = promise(name, std::move(constant));
  graph_.each("Q4NXMatMul", kDomain, [&](Node& node) {
    for (Value& input : node.inputs) input = input.name == name ? value : input;
  });
}

const Q4NXConstant* RepackedWeights::find(const Value& value) const {
  const auto found = value.constant == &kToBeMade ? constants_.find(value.name) : constants_.end();
  return found == constants_.end() ? nullptr : &found->second;
}

std::vector<Q4NXConstant::StackedWeight> RepackedWeights::parts_of(const Node& product) const {
  const Value& weight = product.inputs[kProductWeight];
  if (const Q4NXConstant* constant = find(weight)) return constant->parts();
  const std::int64_t rows = product.required_integer("M");
  const std::int64_t columns = product.required_integer("K");
  if (weight.constant == nullptr || weight.type != DataType::kUInt8 || !weight.shape) return {};
  const auto layout = q4nx::layout_of(*weight.shape);
  if (!layout || !(*weight.shape == q4nx::blocks_shape(rows, columns, *layout))) return {};
  return {{weight, rows, columns, *layout}};
}

std::string RepackedWeights::join_obstacle(const std::vector<const Node*>& products) const {
  std::int64_t columns = 0;
  std::optional<q4nx::Layout> other;
  for (const Node* product : products) {
    if (product->inputs[kProductWeight].constant == nullptr)
      return "the weight of " + product->name + " is not a constant of the model";
    const std::vector<Q4NXConstant::StackedWeight> parts = parts_of(*product);
    if (parts.empty())
      return "the weight of " + product->name + " is not one of its M rows and K columns";
    if (columns > 0 && parts.front().columns != columns)
      return "weights of " + std::to_string(columns) + " and " +
             std::to_string(parts.front().columns) + " columns, expected as many";
    columns = parts.front().columns;
    for (const Q4NXConstant::StackedWeight& part : parts) {
      if (other && part.layout.code_bits != other->code_bits) return "weights of 4 and of 8 bits";
      if (other && part.layout.has_table != other->has_table)
        return "weights with and without a table of values";
      other = part.layout;
    }
  }
  return "";
}

Value RepackedWeights::join(const std::vector<const Node*>& products, const std::string& name) {
  std::vector<Q4NXConstant::StackedWeight> parts;
  for (const Node* product : products) {
    for (const Q4NXConstant::StackedWeight& part : parts_of(*product)) parts.push_back(part);
  }
  return promise(graph_.unique_name(joined_name(products, name).append(kSuffix)),
                 Q4NXConstant(std::move(parts)));
}

void RepackedWeights::make(std::vector<Node>& nodes) {
  std::unordered_map<std::string, std::size_t> offsets;
  std::vector<std::pair<Value*, std::size_t>> readers;
  std::size_t end = 0;
  for (Node& node : nodes) {
    for (Value& value : node.inputs) {
      if (value.constant != &kToBeMade) continue;
      const auto [entry, is_new] = offsets.try_emplace(value.name, end);
      if (is_new) end += round_up(value.bytes(), kAlignment);
      readers.emplace_back(&value, entry->second);
    }
  }
  if (readers.empty()) return;
  // A decode step reads every weight once, in order, and waits for an address translation for each
  // page, so pages are large. The memory is not initialised, because pack() writes all bytes that
  // are read.
  const std::shared_ptr<std::byte> memory = allocate_large_pages(end);
  for (const auto& [value, offset] : readers) {
    value->constant = memory.get() + offset;
    value->owner = memory;
  }
  std::vector<Q4NXConstant::Piece> pieces;
  std::vector<const Q4NXConstant*> of_piece;
  for (const auto& [name, offset] : offsets) {
    const Q4NXConstant& constant = constants_.at(name);
    std::ranges::move(constant.pieces(memory.get() + offset, false), std::back_inserter(pieces));
    of_piece.resize(pieces.size(), &constant);
  }
  const std::vector<Difference> differences = run(pieces);
  std::map<const Q4NXConstant*, Difference> of_constant;
  for (std::size_t i = 0; i < pieces.size(); ++i) of_constant[of_piece[i]] += differences[i];
  for (const auto& [constant, difference] : of_constant) count(*constant, difference);
}

void RepackedWeights::count(const Q4NXConstant& constant, const Difference& difference) {
  for (const Q4NXConstant::StackedWeight& part : constant.parts()) {
    made_ += std::holds_alternative<QuantizedWeight>(part.source) ? 1 : 0;
    quantized_again_ += part.keeps_codes() ? 0 : 1;
  }
  largest_error_ = std::max(largest_error_, difference.relative());
}

}  // namespace flownpu::lowering
