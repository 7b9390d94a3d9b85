// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/run/host_operators.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

#include "ops/nodes/kv_cache.h"
#include "ops/npu/nodes/lowered_node.h"
#include "ops/npu/run/host_call.h"
#include "ops/npu/run/host_experts.h"
#include "ops/npu/run/host_states.h"
#include "ops/transformer/decoder.h"

namespace flownpu::npu {
namespace {

using cpu::Kernels;
using transformer::QkNorm;

// --- Norms of rows

enum class Norm : std::uint8_t { kRms, kAddRms, kRmsAdd, kRmsSum, kAddLayer };

class NormOfRows final : public HostOperator {
 public:
  NormOfRows(Norm norm, const HostCallReader& reader)
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
  explicit NormRope(const HostCallReader& reader)
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

template <typename Operator, auto... kind>
std::unique_ptr<HostOperator> make(const HostCallReader& reader) {
  return std::make_unique<Operator>(kind..., reader);
}

struct Known {
  std::string_view op_type;
  std::unique_ptr<HostOperator> (*make)(const HostCallReader& reader);
};

constexpr std::array<Known, 13> kOperators{{
    {"rms_norm", make<NormOfRows, Norm::kRms>},
    {"add_rms_norm", make<NormOfRows, Norm::kAddRms>},
    {"rms_norm_add", make<NormOfRows, Norm::kRmsAdd>},
    {"rms_norm_sum", make<NormOfRows, Norm::kRmsSum>},
    {"add_layer_norm", make<NormOfRows, Norm::kAddLayer>},
    {"norm_rope", make<NormRope>},
    {"experts", make_experts_of_rows},
    {"route", make_route},
    {"add_experts", make_add_experts},
    {"mixer", make_mixer},
    {"before_delta", make_before_delta},
    {"after_delta", make_after_delta},
    {"output_gate", make_output_gate},
}};

}  // namespace

std::unique_ptr<HostOperator> make_host_operator(const HostCallRecord& record,
                                                 const std::string& label) {
  const HostCallReader reader(record, label);
  std::string names;
  for (const Known& known : kOperators) {
    if (known.op_type == record.op_type) return known.make(reader);
    names.append(names.empty() ? "" : ", ").append(known.op_type);
  }
  fail(reader.where(), "expected an operator of ", names, ", got ", record.op_type,
       ": build the designs with the flownpu that runs them");
}

}  // namespace flownpu::npu
