// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/run/host_operators.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string_view>

#include "ops/error.h"
#include "ops/formats/numbers.h"
#include "ops/nodes/kv_cache.h"
#include "ops/npu/nodes/lowered_node.h"
#include "ops/npu/run/layer_experts.h"
#include "ops/transformer/decoder.h"

namespace flownpu::npu {
namespace {

using cpu::Kernels;
using transformer::QkNorm;

// Rows that a thread computes at a time: a few KB each, neighbours in memory.
constexpr std::size_t kRowsOfTask = 8;

using Arguments = std::vector<std::pair<std::string_view, std::size_t>>;

// Reads an operator's record; messages name the operator.
class Reader {
 public:
  Reader(const HostCallRecord& record, const std::string& label) : record_(record), label_(label) {}

  // A parameter from 1 to 2^31 - 1.
  std::size_t size(std::string_view name) const {
    const std::int64_t value = number(name);
    if (value < 1) fail(where(), "expected a ", name, " of 1 or more, got ", value);
    return static_cast<std::size_t>(value);
  }
  std::size_t number_below(std::string_view name, std::size_t end) const {
    const std::int64_t value = number(name);
    if (value < 0 || static_cast<std::size_t>(value) >= end)
      fail(where(), "expected a ", name, " below ", end, ", got ", value);
    return static_cast<std::size_t>(value);
  }
  float real(std::string_view name) const {
    return std::bit_cast<float>(static_cast<std::int32_t>(number(name)));
  }
  // A parameter: elements from one row to the next, at least `columns`.
  std::size_t line(std::string_view name, std::size_t columns) const {
    const std::size_t value = size(name);
    if (value < columns)
      fail(where(), "expected a ", name, " of ", columns, " or more, got ", value);
    return value;
  }
  // Checks the names of the arguments, and their sizes in bytes.
  void arguments(const Arguments& expected) const {
    if (record_.buffers.size() != expected.size())
      fail(where(), "expected ", expected.size(), " arguments, got ", record_.buffers.size());
    const BufferRecord* found = record_.buffers.data();
    for (const auto& [name, bytes] : expected) {
      if (found->name != name || found->bytes != bytes) {
        fail(where(), "expected ", name, " of ", bytes, " bytes, got ", found->name, " of ",
             found->bytes);
      }
      ++found;
    }
  }
  const BufferRecord& argument(std::size_t number) const {
    if (number >= record_.buffers.size())
      fail(where(), "expected more than ", number, " arguments, got ", record_.buffers.size());
    return record_.buffers[number];
  }
  std::string where() const { return "[FlowNPU] " + label_ + ", on the host: "; }

 private:
  std::int64_t number(std::string_view name) const {
    const auto found = record_.parameters.find(name);
    if (found == record_.parameters.end() || found->second.size() != 1)
      fail(where(), "expected a number as its parameter ", name, ", got ",
           found == record_.parameters.end() ? "none" : "several");
    return found->second.front();
  }

  const HostCallRecord& record_;
  const std::string& label_;
};

std::byte* bytes_of(const View& view) { return view.buffer->bytes().data() + view.offset; }

template <typename T>
T* elements_of(const View& view) {
  return reinterpret_cast<T*>(bytes_of(view));
}

void to_host(const View& view, std::size_t offset, std::size_t bytes) {
  if (!view.constant) view.buffer->to_host(view.offset + offset, bytes);
}

void to_device(const View& view, std::size_t offset, std::size_t bytes) {
  view.buffer->to_device(view.offset + offset, bytes);
}

void widen(const std::uint16_t* from, std::size_t count, float* to) {
  std::transform(from, from + count, to, from_bfloat16);
}

void narrow(const Kernels& kernels, const float* from, std::size_t count, std::uint16_t* to) {
  kernels.store_cache(from, to, DataType::kBFloat16, static_cast<std::int64_t>(count));
}

// Calls task(row, scratch) for all rows, on all threads; `scratch` has `floats` elements for each.
template <typename Task>
void for_rows(const HostCompute& compute, std::size_t rows, std::size_t floats,
              std::vector<float>& scratch, const Task& task) {
  scratch.resize(static_cast<std::size_t>(compute.pool->threads()) * floats);
  const std::size_t tasks = (rows + kRowsOfTask - 1) / kRowsOfTask;
  compute.pool->run(static_cast<std::int64_t>(tasks), [&](std::int64_t index, std::size_t thread) {
    const std::size_t first = static_cast<std::size_t>(index) * kRowsOfTask;
    for (std::size_t row = first; row < std::min(rows, first + kRowsOfTask); ++row)
      task(row, scratch.data() + thread * floats);
  });
}

// --- Norms of rows

enum class Norm : std::uint8_t { kRms, kAddRms, kRmsAdd, kRmsSum, kAddLayer };

class NormOfRows final : public HostOperator {
 public:
  NormOfRows(Norm norm, const Reader& reader)
      : norm_(norm),
        rows_(reader.size("rows")),
        columns_(reader.size("columns")),
        x_line_(reader.line("x_line", columns_)),
        y_line_(reader.line("y_line", columns_)),
        weight_line_(reader.line("weight_line", columns_)),
        epsilon_(reader.real("epsilon")) {
    const std::size_t x = rows_ * x_line_ * kBFloat16Bytes;
    const std::size_t y = rows_ * y_line_ * kBFloat16Bytes;
    const std::size_t stream = rows_ * columns_ * sizeof(float);
    if (norm == Norm::kRms) {
      weights_.resize(columns_);
      reader.arguments({{"x", x}, {"weight", columns_ * kBFloat16Bytes}, {"y", y}});
      return;
    }
    // Whether the residual stream begins here, in bf16.
    begins_ = reader.argument(1).bytes == stream / 2;
    second_ = norm == Norm::kRmsAdd ? weight_line_ : norm == Norm::kAddLayer ? columns_ : 0;
    weights_.resize(norm == Norm::kRmsSum ? columns_ : second_ + columns_);
    reader.arguments({{"x", x},
                      {"residual", begins_ ? stream / 2 : stream},
                      {"weight", weights_.size() * kBFloat16Bytes},
                      {"s", stream},
                      {"y", y}});
  }

  void run(const HostCompute& compute, std::span<const View> arguments, std::int64_t /*position*/,
           std::size_t rows) override {
    const bool adds = norm_ != Norm::kRms;
    const View& x = arguments[0];
    const View& y = arguments.back();
    const std::size_t count = std::min(rows, rows_);
    to_host(arguments[0], 0, x.bytes / rows_ * count);
    if (adds) to_host(arguments[1], 0, arguments[1].bytes / rows_ * count);
    widen(elements_of<std::uint16_t>(arguments[adds ? 2 : 1]), weights_.size(), weights_.data());
    for_rows(compute, count, 2 * columns_, scratch_, [&](std::size_t row, float* values) {
      widen(elements_of<std::uint16_t>(x) + row * x_line_, columns_, values);
      float* sums = values;
      if (adds) {
        sums = elements_of<float>(arguments[3]) + row * columns_;
        add(*compute.kernels, values, arguments[1], row, sums);
      }
      normalise(*compute.kernels, sums, values);
      narrow(*compute.kernels, values, columns_, elements_of<std::uint16_t>(y) + row * y_line_);
    });
    if (adds) to_device(arguments[3], 0, arguments[3].bytes / rows_ * count);
    to_device(y, 0,
              y.bytes / rows_ * count);  // Includes the memory between rows, which no array writes.
  }

 private:
  // sums = values + the stream before; values are normalised first if the operator has a norm for
  // them.
  void add(const Kernels& kernels, float* values, const View& before, std::size_t row,
           float* sums) const {
    const auto n = static_cast<std::int64_t>(columns_);
    if (norm_ == Norm::kRmsAdd || norm_ == Norm::kRmsSum)
      kernels.rms_norm(values, weights_.data(), epsilon_, values, n);
    const float* stream = elements_of<float>(before) + row * columns_;
    if (begins_) {
      widen(elements_of<std::uint16_t>(before) + row * columns_, columns_, values + columns_);
      stream = values + columns_;
    }
    kernels.add(values, stream, sums, n);
  }

  void normalise(const Kernels& kernels, const float* sums, float* values) const {
    const auto n = static_cast<std::int64_t>(columns_);
    const float* second = weights_.data() + second_;
    if (norm_ == Norm::kRmsSum)
      std::copy_n(sums, columns_, values);
    else if (norm_ == Norm::kAddLayer)
      kernels.layer_norm(sums, weights_.data(), second, epsilon_, values, n);
    else
      kernels.rms_norm(sums, second, epsilon_, values, n);
  }

  Norm norm_;
  std::size_t rows_, columns_, x_line_, y_line_, weight_line_;
  float epsilon_;
  bool begins_ = false;
  std::size_t second_ = 0;  // where the second weight, or the bias, begins
  std::vector<float> weights_, scratch_;
};

// --- QK-norm and RoPE

class NormRope final : public HostOperator {
 public:
  explicit NormRope(const Reader& reader)
      : tokens_(reader.size("tokens")),
        heads_(reader.size("heads")),
        kv_heads_(reader.size("kv_heads")),
        size_(reader.size("head_size")),
        context_(reader.size("context")),
        line_(reader.line("line", (heads_ + 2 * kv_heads_) * size_)),
        table_(reader.number_below("table", reader.size("tables"))),
        norm_(static_cast<QkNorm>(reader.number_below("qk_norm", transformer::kQkNorms.size()))),
        epsilon_(reader.real("epsilon")),
        int8_(reader.number_below("int8", 2) != 0),
        where_(reader.where()) {
    const std::size_t qkv = tokens_ * line_ * kBFloat16Bytes;
    const std::size_t rotary = reader.size("tables") * context_ * size_ * kBFloat16Bytes;
    const std::size_t q = tokens_ * heads_ * size_ * kBFloat16Bytes;
    const std::size_t cache = context_ * position_bytes();
    Arguments expected{{"qkv", qkv}, {"rotary", rotary}, {"q", q}, {"cache", cache}};
    // Weights of queries, then of keys.
    const std::size_t heads = norm_ == QkNorm::kNone       ? 0
                              : norm_ == QkNorm::kEachHead ? 2
                                                           : heads_ + kv_heads_;
    weights_.resize(heads * size_);
    if (heads > 0) expected.insert(expected.begin() + 2, {"norms", heads * size_ * kBFloat16Bytes});
    if (int8_) {
      if (row_bytes() < size_ + kInt8ScaleBytes)
        fail(where_, "expected heads whose rows of int8 have room for a scale, got ", size_,
             " elements");
      expected.emplace_back("int8_rows", context_ * 2 * kv_heads_ * row_bytes());
    }
    reader.arguments(expected);
    if (size_ % 2 != 0) fail(where_, "expected an even head_size, got ", size_);
  }

  // Zeros follow the last key in the cache, as with_zeros() says (artifacts/program_record.h).
  void run(const HostCompute& compute, std::span<const View> arguments, std::int64_t position,
           std::size_t rows) override {
    const auto first = static_cast<std::size_t>(position);
    if (position < 0 || first + tokens_ > context_) {
      fail(where_, "expected ", tokens_, " positions below ", context_, ", got ", position,
           " and on");
    }
    const View& qkv = arguments[0];
    const std::size_t at = arguments.size() - (int8_ ? 3 : 2);
    const View& q = arguments[at];
    const View& cache = arguments[at + 1];
    const std::size_t count = std::min(rows, tokens_);
    const std::size_t end = with_zeros(first + count, context_);
    to_host(arguments[0], 0, qkv.bytes / tokens_ * count);
    if (!weights_.empty())
      widen(elements_of<std::uint16_t>(arguments[2]), weights_.size(), weights_.data());
    const auto* angles =
        elements_of<std::uint16_t>(arguments[1]) + (table_ * context_ + first) * size_;
    for_rows(compute, count, (1 + heads_) * size_, scratch_,
             [&](std::size_t token, float* scratch) {
               widen(angles + token * size_, size_, scratch);
               auto* kept = elements_of<std::uint16_t>(cache) +
                            (first + token) * position_bytes() / kBFloat16Bytes;
               turn_token(*compute.kernels, elements_of<std::uint16_t>(qkv) + token * line_,
                          scratch, elements_of<std::uint16_t>(q) + token * heads_ * size_, kept);
               if (int8_)
                 quantize(*compute.kernels, kept, scratch,
                          bytes_of(arguments.back()) + int8_place(first + token));
             });
    if (int8_)
      to_device(arguments.back(), int8_place(first), int8_place(first + count) - int8_place(first));
    std::memset(bytes_of(cache) + (first + count) * position_bytes(), 0,
                (end - first - count) * position_bytes());
    to_device(q, 0, q.bytes / tokens_ * count);
    to_device(cache, first * position_bytes(), (end - first) * position_bytes());
  }

 private:
  std::size_t position_bytes() const { return 2 * kv_heads_ * size_ * kBFloat16Bytes; }
  std::size_t row_bytes() const {
    return static_cast<std::size_t>(padded_int8_row(static_cast<std::int64_t>(size_)));
  }
  // Where a position's rows of int8 begin.
  std::size_t int8_place(std::size_t position) const {
    return position * 2 * kv_heads_ * row_bytes();
  }

  // Writes a position's rows of int8, given its keys and values.
  void quantize(const Kernels& kernels, const std::uint16_t* kept, float* scratch,
                std::byte* rows) const {
    for (std::size_t i = 0; i < 2 * kv_heads_; ++i) {
      widen(kept + i * size_, size_, scratch);
      kernels.store_cache(scratch, rows + i * row_bytes(), DataType::kInt8,
                          static_cast<std::int64_t>(size_));
    }
  }

  // `scratch`: the token's cosines and sines, then heads. `kept`: [kv heads][key, value] of the
  // cache.
  void turn_token(const Kernels& kernels, const std::uint16_t* row, float* scratch,
                  std::uint16_t* q, std::uint16_t* kept) const {
    turn(kernels, row, heads_, 0, scratch, q, size_);
    row += heads_ * size_;
    turn(kernels, row, kv_heads_, norm_ == QkNorm::kAllHeads ? heads_ * size_ : size_, scratch,
         kept, 2 * size_);
    row += kv_heads_ * size_;
    for (std::size_t head = 0; head < kv_heads_; ++head)
      std::memcpy(kept + (2 * head + 1) * size_, row + head * size_, size_ * kBFloat16Bytes);
  }

  // Normalises and turns heads; the results are `step` elements apart. `weight`: where the weights
  // of their norm begin.
  void turn(const Kernels& kernels, const std::uint16_t* from, std::size_t count,
            std::size_t weight, float* scratch, std::uint16_t* made, std::size_t step) const {
    const auto n = static_cast<std::int64_t>(size_);
    float* heads = scratch + size_;
    widen(from, count * size_, heads);
    if (norm_ == QkNorm::kAllHeads) {
      kernels.rms_norm(heads, weights_.data() + weight, epsilon_, heads,
                       n * static_cast<std::int64_t>(count));
    }
    for (std::size_t i = 0; i < count; ++i, heads += size_) {
      if (norm_ == QkNorm::kEachHead)
        kernels.rms_norm(heads, weights_.data() + weight, epsilon_, heads, n);
      kernels.rope(heads, scratch, scratch + size_ / 2, n / 2, false);
      narrow(kernels, heads, size_, made + i * step);
    }
  }

  std::size_t tokens_, heads_, kv_heads_, size_, context_, line_, table_;
  QkNorm norm_;
  float epsilon_;
  bool int8_;
  std::string where_;
  std::vector<float> weights_, scratch_;
};

// --- Experts

const LayerExperts& experts_of(const HostCompute& compute) {
  if (compute.experts == nullptr)
    fail("[FlowNPU] expected a decoder with experts for a program that computes them");
  return *compute.experts;
}

// Adds the experts' answers to the residual stream, and normalises the sum where there is a weight.
class ExpertsOfRows final : public HostOperator {
 public:
  explicit ExpertsOfRows(const Reader& reader)
      : layer_(reader.number_below("layer", transformer::kMostLayers)),
        rows_(reader.size("rows")),
        columns_(reader.size("columns")),
        x_line_(reader.line("x_line", columns_)),
        y_line_(reader.line("y_line", columns_)),
        epsilon_(reader.real("epsilon")) {
    Arguments expected{{"x", rows_ * x_line_ * kBFloat16Bytes},
                       {"s", rows_ * columns_ * sizeof(float)},
                       {"weight", columns_ * kBFloat16Bytes},
                       {"y", rows_ * y_line_ * kBFloat16Bytes}};
    if (reader.argument(2).name == "weight")
      weight_.resize(columns_);
    else
      expected.erase(expected.begin() + 2);
    reader.arguments(expected);
  }

  void run(const HostCompute& compute, std::span<const View> arguments, std::int64_t /*position*/,
           std::size_t rows) override {
    const std::size_t count = std::min(rows, rows_);
    const View& x = arguments[0];
    const View& y = arguments.back();
    to_host(x, 0, x.bytes / rows_ * count);
    to_host(arguments[1], 0, arguments[1].bytes / rows_ * count);
    given_.resize(count * columns_);
    made_.resize(count * columns_);
    for (std::size_t row = 0; row < count; ++row)
      widen(elements_of<std::uint16_t>(x) + row * x_line_, columns_,
            given_.data() + row * columns_);
    experts_of(compute).answer(layer_, given_, made_);
    if (!weight_.empty()) widen(elements_of<std::uint16_t>(arguments[2]), columns_, weight_.data());
    for_rows(compute, count, columns_, scratch_, [&](std::size_t row, float* values) {
      const auto n = static_cast<std::int64_t>(columns_);
      float* sum = elements_of<float>(arguments[1]) + row * columns_;
      compute.kernels->add(made_.data() + row * columns_, sum, sum, n);
      const float* result = sum;
      if (!weight_.empty()) {
        compute.kernels->rms_norm(sum, weight_.data(), epsilon_, values, n);
        result = values;
      }
      narrow(*compute.kernels, result, columns_, elements_of<std::uint16_t>(y) + row * y_line_);
    });
    to_device(arguments[1], 0, arguments[1].bytes / rows_ * count);
    to_device(y, 0, y.bytes / rows_ * count);
  }

 private:
  std::size_t layer_, rows_, columns_, x_line_, y_line_;
  float epsilon_;
  std::vector<float> weight_, given_, made_, scratch_;
};

// The experts of one row, which an array then computes.
class Route final : public HostOperator {
 public:
  explicit Route(const Reader& reader)
      : layer_(reader.number_below("layer", transformer::kMostLayers)),
        experts_(reader.size("experts")),
        given_(reader.size("columns")) {
    reader.arguments({{"x", given_.size() * kBFloat16Bytes},
                      {"chosen", experts_ * sizeof(std::int32_t)},
                      {"shares", experts_ * sizeof(float)}});
  }

  void run(const HostCompute& compute, std::span<const View> arguments, std::int64_t /*position*/,
           std::size_t /*rows*/) override {
    to_host(arguments[0], 0, arguments[0].bytes);
    widen(elements_of<std::uint16_t>(arguments[0]), given_.size(), given_.data());
    experts_of(compute).route(layer_, given_, {elements_of<std::int32_t>(arguments[1]), experts_},
                              {elements_of<float>(arguments[2]), experts_});
  }

 private:
  std::size_t layer_, experts_;
  std::vector<float> given_;
};

// Adds an array's answers for one row.
class AddExperts final : public HostOperator {
 public:
  explicit AddExperts(const Reader& reader)
      : experts_(reader.size("experts")),
        answer_(reader.size("columns")),
        line_(reader.line("line", answer_.size())) {
    reader.arguments({{"answers", experts_ * line_ * kBFloat16Bytes},
                      {"shares", experts_ * sizeof(float)},
                      {"s", answer_.size() * sizeof(float)},
                      {"y", answer_.size() * kBFloat16Bytes}});
  }

  void run(const HostCompute& compute, std::span<const View> arguments, std::int64_t /*position*/,
           std::size_t /*rows*/) override {
    const auto n = static_cast<std::int64_t>(answer_.size());
    for (const std::size_t argument : {0, 2})
      to_host(arguments[argument], 0, arguments[argument].bytes);
    float* sum = elements_of<float>(arguments[2]);
    for (std::size_t expert = 0; expert < experts_; ++expert) {
      widen(elements_of<std::uint16_t>(arguments[0]) + expert * line_, answer_.size(),
            answer_.data());
      compute.kernels->add_scaled(answer_.data(), elements_of<float>(arguments[1])[expert], sum, n);
    }
    narrow(*compute.kernels, sum, answer_.size(), elements_of<std::uint16_t>(arguments[3]));
    for (const std::size_t argument : {2, 3})
      to_device(arguments[argument], 0, arguments[argument].bytes);
  }

 private:
  std::size_t experts_;
  std::vector<float> answer_;
  std::size_t line_;
};

template <typename Operator, auto... kind>
std::unique_ptr<HostOperator> make(const Reader& reader) {
  return std::make_unique<Operator>(kind..., reader);
}

struct Known {
  std::string_view op_type;
  std::unique_ptr<HostOperator> (*make)(const Reader& reader);
};

constexpr std::array<Known, 9> kOperators{{
    {"rms_norm", make<NormOfRows, Norm::kRms>},
    {"add_rms_norm", make<NormOfRows, Norm::kAddRms>},
    {"rms_norm_add", make<NormOfRows, Norm::kRmsAdd>},
    {"rms_norm_sum", make<NormOfRows, Norm::kRmsSum>},
    {"add_layer_norm", make<NormOfRows, Norm::kAddLayer>},
    {"norm_rope", make<NormRope>},
    {"experts", make<ExpertsOfRows>},
    {"route", make<Route>},
    {"add_experts", make<AddExperts>},
}};

}  // namespace

std::unique_ptr<HostOperator> make_host_operator(const HostCallRecord& record,
                                                 const std::string& label) {
  const Reader reader(record, label);
  std::string names;
  for (const Known& known : kOperators) {
    if (known.op_type == record.op_type) return known.make(reader);
    names.append(names.empty() ? "" : ", ").append(known.op_type);
  }
  fail(reader.where(), "expected an operator of ", names, ", got ", record.op_type,
       ": build the designs with the flownpu that runs them");
}

}  // namespace flownpu::npu
