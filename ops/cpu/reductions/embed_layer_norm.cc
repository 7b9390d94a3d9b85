// SPDX-License-Identifier: Apache-2.0
// EmbedLayerNormalization, which ONNX Runtime's optimiser makes of an encoder's first nodes: the
// layer norm of a token's embedding, plus those of its position and its segment.
#include <algorithm>
#include <string>
#include <string_view>

#include "ops/cpu/integers.h"
#include "ops/cpu/step.h"
#include "ops/cpu/widened.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

// The schema has no bfloat16.
constexpr Types kTypes{DataType::kFloat32, DataType::kFloat16};
// B rows of S tokens, V words, P positions, C segments, H elements of an embedding.
constexpr Port kInputs[] = {
    {.name = "input_ids", .types = kInt32, .shape = "[B,S]"},
    optional({.name = "segment_ids", .types = kInt32, .shape = "[B,S]"}),
    {.name = "word_embedding", .types = kTypes, .shape = "[V,H]", .type_letter = 'T'},
    {.name = "position_embedding", .types = kTypes, .shape = "[P,H]", .type_letter = 'T'},
    optional({.name = "segment_embedding", .types = kTypes, .shape = "[C,H]", .type_letter = 'T'}),
    {.name = "gamma", .types = kTypes, .shape = "[H]", .type_letter = 'T'},
    {.name = "beta", .types = kTypes, .shape = "[H]", .type_letter = 'T'},
    optional({.name = "mask", .types = kInt32, .shape = "[B,S]"}),
    optional({.name = "position_ids", .types = kInt32, .shape = "[?,S]"})};
enum Input : std::uint8_t {
  kIds = position(kInputs, "input_ids"),
  kSegmentIds = position(kInputs, "segment_ids"),
  kWords = position(kInputs, "word_embedding"),
  kPositions = position(kInputs, "position_embedding"),
  kSegments = position(kInputs, "segment_embedding"),
  kGamma = position(kInputs, "gamma"),
  kBeta = position(kInputs, "beta"),
  kMask = position(kInputs, "mask"),
  kPositionIds = position(kInputs, "position_ids"),
};

class EmbedLayerNorm final : public Step {
 public:
  EmbedLayerNorm(const Node& node, const Context& context)
      : context_(context),
        name_(to_string(node)),
        epsilon_(node.number("epsilon", 1e-12F)),
        has_sums_(node.has_output(2)) {
    if ((node.input(kSegmentIds) == nullptr) != (node.input(kSegments) == nullptr))
      fail("[", name_, "] expected both segment_ids and segment_embedding or neither");
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& ids = inputs[kIds].shape;
    if (is_given(inputs, kPositionIds)) {
      const std::int64_t rows = inputs[kPositionIds].shape[0];
      if (rows != 1 && rows != ids[0])
        fail("[", name_, "] expected position_ids for 1 or ", ids[0], " rows, got ", rows);
    } else if (ids[1] > inputs[kPositions].shape[0]) {
      fail("[", name_, "] expected at most ", inputs[kPositions].shape[0],
           " tokens, for which there are positions, got ", ids[1], ": shorten the text");
    }
    const Shape embedded{ids[0], ids[1], inputs[kWords].shape[1]};
    for (std::size_t i = 0; i < outputs.size(); ++i) outputs[i] = i == 1 ? Shape{ids[0]} : embedded;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    check(inputs, kIds, kWords, "words");
    check(inputs, kSegmentIds, kSegments, "segments");
    check(inputs, kPositionIds, kPositions, "positions");
    const std::int64_t tokens = inputs[kIds].shape[1];
    const std::int64_t n = inputs[kWords].shape[1];
    const auto row_of = [&](Input table, std::int64_t index) {
      return inputs[table].as<const float>() + index * n;
    };
    const auto id = [&](Input ids, std::int64_t token) {
      return std::int64_t{inputs[ids].as<const std::int32_t>()[token]};
    };
    const bool repeats = is_given(inputs, kPositionIds) && inputs[kPositionIds].shape[0] == 1;
    auto* normed = outputs[0].as<float>();
    auto* sums = has_sums_ ? outputs[2].as<float>() : normed;
    context_.pool->run_rows(n == 0 ? 0 : inputs[kIds].shape.elements(), [&](std::int64_t token) {
      const std::int64_t place = is_given(inputs, kPositionIds)
                                     ? id(kPositionIds, repeats ? token % tokens : token)
                                     : token % tokens;
      float* sum = sums + token * n;
      context_.kernels.add(row_of(kWords, id(kIds, token)), row_of(kPositions, place), sum, n);
      if (is_given(inputs, kSegments))
        context_.kernels.add(sum, row_of(kSegments, id(kSegmentIds, token)), sum, n);
      context_.kernels.layer_norm(sum, row_of(kGamma, 0), row_of(kBeta, 0), epsilon_,
                                  normed + token * n, n);
    });
    if (outputs.size() > 1 && outputs[1].data != nullptr) count_masked(inputs, outputs[1]);
  }

 private:
  // Throws Error if an index lies outside of its table.
  void check(std::span<const Tensor> inputs, Input ids, Input table, std::string_view what) const {
    if (!is_given(inputs, ids)) return;
    const std::int64_t count = inputs[table].shape[0];
    const auto* begin = inputs[ids].as<const std::int32_t>();
    const auto* end = begin + inputs[ids].shape.elements();
    const auto* bad =
        std::find_if(begin, end, [&](auto index) { return index < 0 || index >= count; });
    if (bad != end) fail("[", name_, "] expected one of ", count, " ", what, ", got ", *bad);
  }

  // ONNX Runtime's mask_index: the number of ones in each row of the mask, 0 without a mask.
  static void count_masked(std::span<const Tensor> inputs, const Tensor& counts) {
    auto* y = counts.as<std::int32_t>();
    const std::int64_t tokens = inputs[kIds].shape[1];
    for (std::int64_t row = 0; row < inputs[kIds].shape[0]; ++row) {
      y[row] = 0;
      if (!is_given(inputs, kMask)) continue;
      const auto* mask = inputs[kMask].as<const std::int32_t>() + row * tokens;
      y[row] = static_cast<std::int32_t>(std::count(mask, mask + tokens, 1));
    }
  }

  Context context_;
  std::string name_;
  float epsilon_;
  bool has_sums_;
};

constexpr Port kOutputs[] = {
    {.name = "output", .types = kTypes, .type_letter = 'T'},
    optional({.name = "mask_index", .types = kInt32}),
    optional({.name = "embedding_sum", .types = kTypes, .type_letter = 'T'})};
// mask_index_type is about shape inference alone.
constexpr AttributeRule kAttributes[] = {number("epsilon"), flag("mask_index_type")};

constexpr Operator kOperators[] = {
    {{"com.microsoft", "EmbedLayerNormalization", 1, 1, kInputs, kOutputs, kAttributes},
     widened<make<EmbedLayerNorm>>}};

}  // namespace

std::span<const Operator> embed_layer_norm_operators() { return kOperators; }

}  // namespace flownpu::cpu
