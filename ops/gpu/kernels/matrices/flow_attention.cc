// SPDX-License-Identifier: Apache-2.0
// Attention of several tokens by matrix units (Gemma3 paper, section 3.1.3; the online softmax is
// that of flow_attention). A work-group has up to 64 queries of a KV head, those of a token's heads
// one behind the other, and sweeps its keys in chunks of 32:
//  1. Scores: its lanes convert keys to float16 in the work-group's memory, and its subgroups
//     multiply them with the queries there. The scores go into that memory, because only the driver
//     knows which lane has which element of a matrix.
//  2. Weights: the lanes of a query share its keys; they apply softcap and range, find the new
//     maximum, and write weights as float16, and by how much older sums shrink.
//  3. Values: lanes convert them, transposed, and subgroups add their product with the weights to
//     sums that stay in registers, after these shrank: elements of a row times the row's factor,
//     which is a matrix of equal columns.
// Heads of more than a slice's elements are converted slice by slice.
//
// Errors: rounding a number to float16, which may be to either neighbour, changes it by at most
// 2^-10 of its magnitude, or by 2^-14 where that is more. So a score is off by 2^-9 of the sum of
// its products' magnitudes, and a result by 2^-9 of the mean magnitude of values beside what its
// scores' errors make of it. Weights are up to 2^15, so that those below float16's smallest normal
// number are below 2^-29 of the largest. Keys and values beyond 65504 become infinite.
//
// In the work-group's memory, in words of 32 bits, rows of float16 padded by 4 words:
//     query [rows, head], given [32 keys, slice] or [slice, 32 keys], weights [rows, 32 keys] uint;
//     scores [32 keys, rows] float, also a matrix of each subgroup; factors [columns of a matrix,
//     rows] float; of_parts [lanes] float.
#include "ops/gpu/kernels/matrices/flow_attention.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "ops/error.h"
#include "ops/gpu/kernels/pieces.h"
#include "ops/gpu/language/text.h"

namespace flownpu::gpu {
namespace {

constexpr std::int64_t kItems = 128;
constexpr std::int64_t kChunk = 32;  // of a chunk
constexpr std::int64_t kPadding = 4;
// The most elements of sums: 64 registers of a lane.
constexpr std::int64_t kMostSums = 64 * kItems;
// Bytes of a work-group's memory: two of them share the 64 KiB of a compute unit of RDNA 3, and
// drivers give one no more (AMD's own) or more (RADV).
constexpr std::int64_t kMostMemory = 32768;

constexpr std::int64_t words_of(std::int64_t halves) { return halves / 2 + kPadding; }

// How the subgroups share a grid of matrices: `over` beside one another along rows, the others
// along columns; each has `rows` x `columns`. The last columns may be beyond `all`.
struct Spread {
  std::int64_t over;
  std::int64_t across;
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t all;  // columns of the grid

  Spread(std::int64_t subgroups, std::int64_t all_rows, std::int64_t all_columns)
      : over(std::min(subgroups, all_rows)),
        across(subgroups / over),
        rows(all_rows / over),
        columns(q4nx::ceil_div(all_columns, across)),
        all(all_columns) {}
};

struct Plan {
  std::int64_t rows;   // queries of a work-group
  std::int64_t slice;  // elements of heads that are in the work-group's memory at once
  std::int64_t words;  // of the work-group's memory
  std::int64_t given;
  std::int64_t scores;
  Spread of_scores;
  Spread of_sums;  // of a slice
};

Plan plan_of(const AttentionShape& shape, const MatrixUnits& units, std::int64_t rows,
             std::int64_t slice) {
  const std::int64_t subgroups = kItems / units.lanes;
  Plan plan{
      .rows = rows,
      .slice = slice,
      .words = 0,
      .given = std::max(kChunk * words_of(slice), slice * words_of(kChunk)),
      .scores = std::max(rows * kChunk, subgroups * units.rows * units.columns),
      .of_scores = Spread(subgroups, rows / units.rows, kChunk / units.columns),
      .of_sums = Spread(subgroups, rows / units.rows, slice / units.columns),
  };
  plan.words = rows * words_of(shape.head_size) + plan.given + plan.scores +
               rows * words_of(kChunk) + units.columns * rows + kItems;
  return plan;
}

// The most rows, then the largest slices, that fit; none if no tile does.
std::optional<Plan> fitting_plan(const AttentionShape& shape, const MatrixUnits& units) {
  const auto divides = [](std::int64_t size, std::int64_t whole) {
    return size > 0 && whole % size == 0;
  };
  if (shape.has_mask || shape.has_parts || shape.appends || shape.is_paged ||
      !divides(units.lanes, kItems) || !divides(units.columns, kChunk) ||
      !divides(units.depth, kChunk))
    return std::nullopt;
  for (const std::int64_t rows : {64, 32, 16}) {
    if (!divides(units.rows, rows) || (rows > 16 && rows * shape.head_size > kMostSums)) continue;
    for (const std::int64_t slices : {1, 2, 4, 8}) {
      const std::int64_t slice = shape.head_size / slices;
      if (shape.head_size % slices != 0 || slice % kPadding != 0 || !divides(units.depth, slice) ||
          !divides(units.columns, slice))
        continue;
      const Plan plan = plan_of(shape, units, rows, slice);
      if (plan.words * static_cast<std::int64_t>(sizeof(float)) <= kMostMemory) return plan;
    }
  }
  return std::nullopt;
}

Plan plan_that_fits(const AttentionShape& shape, const MatrixUnits& units) {
  const std::optional<Plan> plan = fitting_plan(shape, units);
  if (!plan) fail("expected heads that matrix units can attend, got heads of ", shape.head_size);
  return *plan;
}

constexpr const char* kBody = R"(
  LENGTHS
  const int kv = group(0);
  const int first = group(1) * args.rows;
  const int last_row = args.tokens * args.per_group - 1;
  const int row = lane() % args.rows;
  const int part = lane() / args.rows;
  shared uint query[args.rows * args.query_stride];
  shared uint given[args.given];
  shared uint weights[args.rows * args.stride];
  shared float scores[args.scores];
  shared float factors[args.n * args.rows];
  shared float of_parts[args.lanes];
  for (int i = lane(); i < args.rows * (args.head_size / 4); i += args.lanes) {
    const int of_tile = i / (args.head_size / 4);
    const int element = i % (args.head_size / 4) * 4;
    const int token = min(first + of_tile, last_row) / args.per_group;
    const int head = kv * args.per_group + min(first + of_tile, last_row) % args.per_group;
    const float4 four = args.query_heads.ReadFloats(PLACE_OF_ROW) * args.scale;
    query[of_tile * args.query_stride + element / 2] = halves(four.x, four.y);
    query[of_tile * args.query_stride + element / 2 + 1] = halves(four.z, four.w);
  }
  int begin = 0x7fffffff;
  int end = base;
  const int last_token = min(first + args.rows - 1, last_row) / args.per_group;
  for (int token = first / args.per_group; token <= last_token; ++token) {
    RANGE
    if (from < to) {
      begin = min(begin, from);
      end = max(end, to);
    }
  }
  begin = min(begin, end);
  const int token = min(first + row, last_row) / args.per_group;
  RANGE
  float maximum = -INFINITY;
  float denominator = 0.0f;
  SUMS
  synchronise();
  for (int start = begin; start < end; start += args.keys) {
    const int last = min(args.keys, end - start) - 1;
    SCORES
    float largest = -INFINITY;
    float own[args.each];
    unrolled for (int i = 0; i < args.each; ++i) {
      float score = scores[(part * args.each + i) * args.rows + row];
      if (args.softcap > 0.0f) score = args.softcap * tanh(score / args.softcap);
      own[i] = score;
      const int key = start + part * args.each + i;
      if (key >= from && key < to) largest = fmax(largest, score);
    }
    of_parts[lane()] = largest;
    synchronise();
    largest = maximum;
    unrolled for (int i = 0; i < args.parts; ++i)
      largest = fmax(largest, of_parts[i * args.rows + row]);
    const float factor = largest == maximum ? 1.0f : exp(maximum - largest);
    maximum = largest;
    denominator *= factor;
    unrolled for (int i = 0; i < args.each; i += 2) {
      const int key = start + part * args.each + i;
      const float even = key >= from && key < to ? args.most * exp(own[i] - maximum) : 0.0f;
      const float odd =
          key + 1 >= from && key + 1 < to ? args.most * exp(own[i + 1] - maximum) : 0.0f;
      denominator += even + odd;
      weights[row * args.stride + (part * args.each + i) / 2] = halves(even, odd);
    }
    for (int i = part; i < args.n; i += args.parts) factors[i * args.rows + row] = factor;
    VALUES
  }
  of_parts[lane()] = denominator;
  synchronise();
  if (lane() < args.rows) {
    unrolled for (int i = 1; i < args.parts; ++i) denominator += of_parts[i * args.rows + row];
    SINK
    factors[row] = denominator;
  }
  OUTPUTS
)";

// A slice of keys, from element FIRST on, times that of the queries.
constexpr const char* kScores = R"(
    for (int i = lane(); i < args.keys * (args.slice / 4); i += args.lanes) {
      const int of_chunk = i / (args.slice / 4);
      const int of_slice = i % (args.slice / 4) * 4;
      const int key = start + min(of_chunk, last) - base;
      const int element = FIRST + of_slice;
      const float4 four = args.key.ReadFloats(PLACE_OF_KEY);
      given[of_chunk * args.slice_stride + of_slice / 2] = halves(four.x, four.y);
      given[of_chunk * args.slice_stride + of_slice / 2 + 1] = halves(four.z, four.w);
    }
    synchronise();
    for (int k = 0; k < args.slice; k += args.depth) {
      MULTIPLY
    }
)";

// A slice of values. Neighbouring lanes take pairs of keys, which are neighbours in given, in turn
// with four units of four elements, which are so in the cache.
constexpr const char* kValues = R"(
    for (int i = lane(); i < args.keys / 2 * args.units; i += args.lanes) {
      const int pair = i / 4 % (args.keys / 2);
      const int of_slice = (i % 4 + i / (args.keys * 2) * 4) * 4;
      if (of_slice < args.slice) {
        const int element = FIRST + of_slice;
        int key = start + min(2 * pair, last) - base;
        const float4 even = args.value_rows.ReadFloats(PLACE_OF_KEY);
        key = start + min(2 * pair + 1, last) - base;
        const float4 odd = args.value_rows.ReadFloats(PLACE_OF_KEY);
        given[of_slice * args.stride + pair] = halves(even.x, odd.x);
        given[(of_slice + 1) * args.stride + pair] = halves(even.y, odd.y);
        given[(of_slice + 2) * args.stride + pair] = halves(even.z, odd.z);
        given[(of_slice + 3) * args.stride + pair] = halves(even.w, odd.w);
      }
    }
    synchronise();
    SHRINK
    for (int k = 0; k < args.keys; k += args.depth) {
      MULTIPLY
    }
    synchronise();
)";

constexpr const char* kSink = R"(
    const float sink = args.sinks.Read(kv * args.per_group + min(first + row, last_row) % args.per_group);
    if (maximum > -INFINITY) denominator += args.most * exp(sink - maximum);
)";

// One sum of each subgroup. Only a row without keys has a denominator of 0.
constexpr const char* kOutput = R"(
  STORE
  synchronise();
  for (int i = lane(); i < args.subgroups * (args.m * args.n); i += args.lanes) {
    const int which = i / (args.m * args.n);
    const int column = (which / args.over + BESIDE * args.across) * args.n + i % args.n;
    const int of_tile = (which % args.over + DOWN * args.over) * args.m + i / args.n % args.m;
    const int token = (first + of_tile) / args.per_group;
    if (first + of_tile <= last_row && column < args.slice) {
      const int head = kv * args.per_group + (first + of_tile) % args.per_group;
      const int element = FIRST + column;
      const float sum = scores[which * (args.m * args.n) + i % args.n * args.m + i / args.n % args.m];
      const float total = factors[of_tile];
      args.y.Write(total == 0.0f ? 0.0f : sum / total, PLACE_OF_ROW);
    }
  }
  synchronise();
)";

std::string place_of(std::string text, std::int64_t down, std::int64_t beside) {
  return replaced(std::move(text),
                  {{"DOWN", std::to_string(down)}, {"BESIDE", std::to_string(beside)}});
}

// `text`, in which BESIDE is a column of a subgroup's matrices; conditional if it may be beyond the
// grid.
std::string within(const Spread& spread, std::int64_t column, const std::string& text) {
  if ((column + 1) * spread.across <= spread.all) return text;
  return text_of("if (subgroup() / ", spread.over, " + BESIDE * ", spread.across, " < ", spread.all,
                 ") {\n", text, "}\n");
}

// `text` for each of a subgroup's matrices, DOWN and BESIDE its place among them, behind `of_row`
// for each row and `of_column` for each column.
std::string for_each(const Spread& spread, const std::string& text, const std::string& of_row = "",
                     const std::string& of_column = "") {
  std::string all;
  for (std::int64_t row = 0; row < spread.rows; ++row) all += place_of(of_row, row, 0);
  for (std::int64_t column = 0; column < spread.columns; ++column) {
    std::string matrices = of_column;
    for (std::int64_t row = 0; row < spread.rows; ++row)
      matrices += replaced(text, "DOWN", std::to_string(row));
    all += place_of(within(spread, column, matrices), 0, column);
  }
  return all;
}

// The first row and column of such a matrix in what all subgroups have.
std::string row_of(const Spread& spread) {
  return text_of("(subgroup() % ", spread.over, " + DOWN * ", spread.over, ") * args.m");
}
std::string column_of(const Spread& spread) {
  return text_of("(subgroup() / ", spread.over, " + BESIDE * ", spread.across, ") * args.n");
}

// `sum` += `left` x given, by a step of k; rows of `left` have `stride` words, of which `skipped`
// come first.
std::string multiply(const Spread& spread, const std::string& sum, const std::string& left,
                     const std::string& stride, std::int64_t skipped, const std::string& of_given) {
  return for_each(spread, replaced("SUM = multiplied(left_DOWN, right_BESIDE, SUM);\n", "SUM", sum),
                  text_of("const left_matrix left_DOWN = left_from(", left, ", ", row_of(spread),
                          " * ", stride, " + ", skipped, " + k / 2, ", stride, ");\n"),
                  text_of("const right_matrix right_BESIDE = right_from(given, ", column_of(spread),
                          " * ", of_given, " + k / 2, ", of_given, ");\n"));
}

std::string scores_of(const Plan& plan, std::int64_t slices) {
  const Spread& spread = plan.of_scores;
  const std::string score = "score_DOWN_BESIDE";
  std::string text;
  for (std::int64_t row = 0; row < spread.rows; ++row)
    for (std::int64_t column = 0; column < spread.columns; ++column)
      text += place_of(text_of("sum_matrix ", score, " = matrix_of(0.0f);\n"), row, column);
  for (std::int64_t slice = 0; slice < slices; ++slice) {
    const std::int64_t first = slice * plan.slice;
    if (slice > 0) text += "synchronise();\n";
    text += replaced(kScores, {{"FIRST", std::to_string(first)},
                               {"MULTIPLY", multiply(spread, score, "query", "args.query_stride",
                                                     first / 2, "args.slice_stride")}});
  }
  return text +
         for_each(spread, text_of("to_array(", score, ", scores, ", column_of(spread),
                                  " * args.rows + ", row_of(spread), ", args.rows);\n")) +
         "synchronise();";
}

std::string sum_of(std::int64_t slice) { return text_of("sum_", slice, "_DOWN_BESIDE"); }

std::string values_of(const Plan& plan, std::int64_t slices) {
  const Spread& spread = plan.of_sums;
  const std::string factor = text_of("const sum_matrix factor_DOWN = sum_from(factors, ",
                                     row_of(spread), ", args.rows);\n");
  std::string text;
  for (std::int64_t slice = 0; slice < slices; ++slice)
    text += text_of(
        "{",
        replaced(
            kValues,
            {{"FIRST", std::to_string(slice * plan.slice)},
             {"SHRINK",
              for_each(spread, replaced("SUM = scaled(SUM, factor_DOWN);\n", "SUM", sum_of(slice)),
                       factor)},
             {"MULTIPLY",
              multiply(spread, sum_of(slice), "weights", "args.stride", 0, "args.stride")}}),
        "}");
  return text;
}

// Calls `use` with each of a subgroup's sums: its slice, row and column.
template <typename Use>
std::string over_sums(const Plan& plan, std::int64_t slices, const Use& use) {
  std::string text;
  for (std::int64_t slice = 0; slice < slices; ++slice)
    for (std::int64_t row = 0; row < plan.of_sums.rows; ++row)
      for (std::int64_t column = 0; column < plan.of_sums.columns; ++column)
        text += place_of(use(slice, column), row, column);
  return text;
}

std::string outputs_of(const Plan& plan, std::int64_t slices) {
  return over_sums(plan, slices, [&](std::int64_t slice, std::int64_t column) {
    const std::string store =
        text_of("to_array(", sum_of(slice), ", scores, subgroup() * (args.m * args.n), args.m);\n");
    return replaced(kOutput, {{"STORE", within(plan.of_sums, column, store)},
                              {"FIRST", std::to_string(slice * plan.slice)}});
  });
}

}  // namespace

bool can_attend(const MatrixUnits& units, const AttentionShape& shape, const DeviceFacts& facts) {
  const std::optional<Plan> plan = fitting_plan(shape, units);
  return plan && facts.work_group >= kItems &&
         plan->words * static_cast<std::int64_t>(sizeof(float)) <= facts.local_memory;
}

KernelDescription flow_attention_of_matrices(const AttentionShape& shape,
                                             const MatrixUnits& units) {
  const Plan plan = plan_that_fits(shape, units);
  const std::int64_t slices = shape.head_size / plan.slice;
  const std::int64_t parts = kItems / plan.rows;
  constexpr float kMost = 0x1p15F;  // the largest weight
  KernelDescription kernel = flow_attention(shape);
  kernel.name = "flow_attention_of_matrices";
  kernel.body = attention_text(
      shape, replaced(kBody, {{"SUMS", over_sums(plan, slices,
                                                 [](std::int64_t slice, std::int64_t /*column*/) {
                                                   return text_of("sum_matrix ", sum_of(slice),
                                                                  " = matrix_of(0.0f);\n");
                                                 })},
                              {"SCORES", scores_of(plan, slices)},
                              {"VALUES", values_of(plan, slices)},
                              {"SINK", shape.has_sinks ? kSink : ""},
                              {"OUTPUTS", outputs_of(plan, slices)}}));
  kernel.constants = {{"per_group", shape.heads_per_group()},
                      {"head_size", shape.head_size},
                      {"softcap", shape.softcap},
                      {"causal", std::int64_t{shape.causal ? 1 : 0}},
                      {"scale", shape.scale},
                      {"m", units.rows},
                      {"n", units.columns},
                      {"depth", units.depth},
                      {"subgroups", kItems / units.lanes},
                      {"rows", plan.rows},
                      {"keys", kChunk},
                      {"slice", plan.slice},
                      {"units", q4nx::ceil_div(plan.slice, 16) * 4},
                      {"parts", parts},
                      {"each", kChunk / parts},
                      {"over", plan.of_sums.over},
                      {"across", plan.of_sums.across},
                      {"query_stride", words_of(shape.head_size)},
                      {"slice_stride", words_of(plan.slice)},
                      {"stride", words_of(kChunk)},
                      {"given", plan.given},
                      {"scores", plan.scores},
                      {"most", kMost}};
  kernel.lanes = kItems;
  kernel.matrices = units;
  return kernel;
}

Grid flow_attention_of_matrices_grid(const AttentionShape& shape, const MatrixUnits& units,
                                     std::int64_t batch, std::int64_t tokens) {
  const std::int64_t rows = plan_that_fits(shape, units).rows;
  return {.groups = {shape.kv_heads, q4nx::ceil_div(tokens * shape.heads_per_group(), rows), batch},
          .lanes = kItems};
}

}  // namespace flownpu::gpu
