// SPDX-License-Identifier: Apache-2.0
// FlowKV and FlowQKV (Gemma3 paper, sections 3.1.2 and 3.1.3): the heads that share a KV head sweep
// its keys in chunks, with an online softmax (equations 6 to 12).
//
// A work-group has `rows` queries: `heads` heads of a KV head for each token of its tile. Its lanes
// divide the work on a chunk of keys in three ways, one after the other, each with a barrier behind
// it:
//  1. Scores: 8 lanes share a key. Each takes every eighth unit of it (four elements, or one if the
//     head's size is no multiple of 4) and multiplies it with all rows. A row's sums, eight for a
//     key, go into the work-group's memory.
//  2. Weights: a lane has slots, (row, key) of the chunk. It adds the eight sums, and applies
//     softcap and mask. Then it reads its row's scores for the maximum, four at a time; all lanes
//     of a row read the same ones, which memory broadcasts. It writes the key's weight, and keeps
//     to itself the maximum and its slots' share of the denominator.
//  3. Values: the lanes are in teams, each of which has some of the keys; a lane has one unit of
//     the head. It multiplies what it reads with the weights of all rows.
// Behind the last chunk the lanes' shares of denominators are added, and the teams' sums.
//
// Speed: neighbouring lanes read neighbouring units, 64 bytes of a float16 key, and whole lines of
// values. A single token's attention mostly waits for memory, so a lane asks for all that it needs
// of a chunk's keys, and then of its values, before it multiplies, and a chunk has only three
// barriers. For prompts arithmetic counts: each unit that is read is multiplied with 8 rows (32
// multiplications for its 4 elements), and a float4 of the work-group's memory serves 8 of them
// (two keys) or 16.
//
// of_rows is an array of float, not of float4: after a single component of a float4 in a
// work-group's memory was written, Mesa 22.3's compiler reads its old value.
#include <algorithm>
#include <utility>

#include "ops/gpu/kernels/kernels.h"
#include "ops/gpu/kernels/pieces.h"
#include "ops/gpu/language/text.h"

namespace flownpu::gpu {
namespace {

// Lanes that share a key: with units of four, half a line of 128 bytes of a float16 cache.
constexpr std::int64_t kShares = 8;
// Keys for which a lane computes scores at once, so that it reads a unit of the query once for
// both.
constexpr std::int64_t kPasses = 2;
// The fewest lanes of a work-group.
constexpr std::int64_t kLeastLanes = 64;
// The most rows. A lane keeps, in units, a score for each row and pass, and a sum of values for
// each row: 96 registers of the 256 that RDNA 3 has for a lane.
constexpr std::int64_t kMostRows = 8;
// The most elements of queries: 8 heads of 256 elements. They take 8 KiB beside 20 KiB for 8 rows'
// scores, of the 32 KiB that OpenCL 1.2 requires.
constexpr std::int64_t kMostQueries = 2048;
// Units that a lane asks for before it uses the first: 16 with few rows, which are 64 registers,
// else 8, which are 32.
constexpr std::int64_t kAhead = 8;
constexpr std::int64_t kFewRows = 4;
constexpr std::int64_t kWide = 4;  // elements of a unit

// Numbers that follow from a shape, for the kernel's text and its grid.
struct Plan {
  std::int64_t width;      // elements of a unit
  std::int64_t units;      // of a head
  std::int64_t heads;      // of a work-group
  std::int64_t blocks;     // of `heads` heads, in a KV head's group
  std::int64_t tile;       // tokens of a work-group
  std::int64_t rows;       // heads x tile
  std::int64_t chunk;      // keys
  std::int64_t slots;      // of a lane: its share of rows x chunk
  std::int64_t ahead;      // units of a key that are asked for at once
  std::int64_t columns;    // units that the lanes of a team have at a time
  std::int64_t each;       // units of a lane; more than 1 only if a head has more than lanes
  std::int64_t teams;      // of `columns` lanes
  std::int64_t values;     // units of values that a lane asks for at once
  std::int64_t padded;     // chunk, rounded up to what the teams take at a time
  std::int64_t scratch;    // float4s of partial sums
  std::int64_t together;   // rows whose sums of all teams fit the scratch
  std::int64_t of_newest;  // float4s for the token's own key and value, if it appends them

  std::int64_t row_quads() const { return q4nx::ceil_div(rows, kWide); }
  std::int64_t float4s() const {
    return q4nx::ceil_div(rows * units * width, kWide) + scratch + rows * chunk / kWide +
           padded * row_quads() + row_quads() + of_newest;
  }
};

Plan plan_of(const AttentionShape& shape) {
  Plan plan{};
  plan.width = shape.head_size % kWide == 0 ? kWide : 1;
  plan.units = shape.head_size / plan.width;
  const std::int64_t most = std::clamp<std::int64_t>(kMostQueries / shape.head_size, 1, kMostRows);
  plan.heads = std::min(shape.heads_per_group(), most);
  while (shape.heads_per_group() % plan.heads != 0) --plan.heads;
  plan.blocks = shape.heads_per_group() / plan.heads;
  plan.tile = shape.in_tiles ? most / plan.heads : 1;
  plan.rows = plan.heads * plan.tile;
  plan.chunk = shape.lanes / kShares * kPasses;
  plan.slots = q4nx::ceil_div(plan.rows * plan.chunk, shape.lanes);
  plan.ahead = std::min(q4nx::ceil_div(plan.units, kShares),
                        plan.rows > kFewRows ? kAhead / kPasses : kAhead);
  plan.columns = std::min(plan.units, shape.lanes);
  plan.each = q4nx::ceil_div(plan.units, plan.columns);
  plan.teams = shape.lanes / plan.columns;
  plan.values = std::min(q4nx::ceil_div(plan.chunk, plan.teams), kAhead);
  plan.padded = q4nx::ceil_div(plan.chunk, plan.teams * plan.values) * plan.teams * plan.values;
  const std::int64_t of_teams = q4nx::ceil_div(plan.teams * shape.head_size, kWide);
  plan.scratch = std::max(plan.rows * plan.chunk * kShares / kWide, of_teams);
  plan.together = std::min(plan.scratch / of_teams, plan.rows);
  if (shape.appends)
    plan.of_newest = q4nx::ceil_div(2 * shape.head_size + kSixteenths * (plan.rows + 1), kWide);
  return plan;
}

// UNIT is float4, or float if the head's size is no multiple of 4; READ reads one. Rows are the
// `heads` heads of the tile's first token, then of its second. ADD adds a value, times its key's
// weight, to the sums of all rows.
constexpr const char* kBody = R"(
  const int kv = group(0) / args.blocks;
  const int first_head = kv * args.per_group + group(0) % args.blocks * args.heads;
  const int first_token = group(1) * args.tile;
  LENGTHS
  shared UNIT query[args.rows * args.units];
  shared float4 scratch[args.scratch];
  shared float4 scores[args.rows * args.chunk / 4];
  shared float4 weights[args.padded * args.row_quads];
  shared float of_rows[args.row_quads * 4];
  QUERY
  for (int i = lane(); i < args.padded * args.row_quads; i += args.lanes) weights[i] = 0.0f;
  int begin = 0x7fffffff;
  int end = base;
  for (int i = 0; i < args.tile; ++i) {
    const int token = first_token + i;
    RANGE
    if (from < to) {
      begin = min(begin, from);
      end = max(end, to);
    }
  }
  begin = min(begin, end);
  PART
  int froms[args.slots];
  int tos[args.slots];
  float slot_scores[args.slots];
  float maxima[args.slots];
  float denominators[args.slots];
  unrolled for (int i = 0; i < args.slots; ++i) {
    const int token = first_token + (lane() + i * args.lanes) / args.chunk / args.heads;
    RANGE
    froms[i] = from;
    tos[i] = to;
    maxima[i] = -INFINITY;
    denominators[i] = 0.0f;
    NEWEST_SCORE
  }
  const int share = lane() % args.shares;
  const int key_of_pass = lane() / args.shares;
  const int column = lane() % args.columns;
  const int team = lane() / args.columns;
  UNIT sums[args.each * args.rows];
  unrolled for (int i = 0; i < args.each * args.rows; ++i) sums[i] = NEWEST_VALUE;
  synchronise();
  for (int start = begin; start < end; start += args.chunk) {
    const int last = min(args.chunk, end - start) - 1;
    UNIT dots[args.passes * args.rows];
    unrolled for (int i = 0; i < args.passes * args.rows; ++i) dots[i] = 0.0f;
    for (int first = 0; first < args.units; first += args.ahead * args.shares) {
      UNIT keys[args.ahead * args.passes];
      unrolled for (int i = 0; i < args.ahead; ++i) {
        const int unit = min(first + i * args.shares + share, args.units - 1);
        const int element = unit * args.width;
        unrolled for (int pass = 0; pass < args.passes; ++pass) {
          const int place =
              start + min(pass * (args.lanes / args.shares) + key_of_pass, last) - base;
          const int key = ROW_OF_CACHE;
          keys[i * args.passes + pass] = args.key.READ(PLACE_OF_KEY);
        }
      }
      unrolled for (int i = 0; i < args.ahead; ++i) {
        const int unit = first + i * args.shares + share;
        if (unit < args.units) {
          unrolled for (int row = 0; row < args.rows; ++row) {
            const UNIT part_of_query = query[row * args.units + unit];
            unrolled for (int pass = 0; pass < args.passes; ++pass)
              dots[pass * args.rows + row] += part_of_query * keys[i * args.passes + pass];
          }
        }
      }
    }
    unrolled for (int pass = 0; pass < args.passes; ++pass) {
      const int key = pass * (args.lanes / args.shares) + key_of_pass;
      unrolled for (int row = 0; row < args.rows; ++row) {
        const UNIT dot_of_unit = dots[pass * args.rows + row];
        ((shared float*)scratch)[(row * args.chunk + key) * args.shares + share] = TOTAL;
      }
    }
    synchronise();
    unrolled for (int i = 0; i < args.slots; ++i) {
      const int slot = lane() + i * args.lanes;
      if (slot < args.rows * args.chunk) {
        const float4 four = scratch[slot * 2] + scratch[slot * 2 + 1];
        float score = (four.x + four.y) + (four.z + four.w);
        if (args.softcap > 0.0f) score = args.softcap * tanh(score / args.softcap);
        const int key = slot % args.chunk;
        const int is_seen = key <= last && start + key >= froms[i] && start + key < tos[i];
        MASK
        slot_scores[i] = score;
        ((shared float*)scores)[slot] = is_seen ? score : -INFINITY;
      }
    }
    synchronise();
    unrolled for (int i = 0; i < args.slots; ++i) {
      const int slot = lane() + i * args.lanes;
      if (slot < args.rows * args.chunk) {
        const int row = slot / args.chunk;
        const int key = slot % args.chunk;
        float4 larger = maxima[i];
        unrolled for (int j = 0; j < args.chunk / 4; ++j)
          larger = fmax(larger, scores[row * (args.chunk / 4) + j]);
        const float maximum = fmax(fmax(larger.x, larger.y), fmax(larger.z, larger.w));
        const int is_seen = key <= last && start + key >= froms[i] && start + key < tos[i] UNMASKED;
        const float weight = is_seen ? exp(slot_scores[i] - maximum) : 0.0f;
        const float rescale = maximum == maxima[i] ? 1.0f : exp(maxima[i] - maximum);
        maxima[i] = maximum;
        denominators[i] = denominators[i] * rescale + weight;
        ((shared float*)weights)[key * (args.row_quads * 4) + row] = weight;
        if (key == 0) of_rows[row] = rescale;
      }
    }
    synchronise();
    unrolled for (int i = 0; i < args.each * args.rows; ++i)
      sums[i] *= of_rows[i % args.rows];
    if (team < args.teams) {
      unrolled for (int j = 0; j < args.each; ++j) {
        const int element = min(column + j * args.columns, args.units - 1) * args.width;
        for (int first = team; first <= last; first += args.teams * args.values) {
          UNIT values[args.values];
          unrolled for (int i = 0; i < args.values; ++i) {
            const int place = start + min(first + i * args.teams, last) - base;
            const int key = ROW_OF_CACHE;
            values[i] = args.value_rows.READ(PLACE_OF_KEY);
          }
          unrolled for (int i = 0; i < args.values; ++i) {
            const int place = (first + i * args.teams) * args.row_quads;
            ADD
          }
        }
      }
    }
  }
  unrolled for (int i = 0; i < args.slots; ++i) {
    const int slot = lane() + i * args.lanes;
    if (slot < args.rows * args.chunk) {
      ((shared float*)scores)[slot] = denominators[i]SINK;
      MAXIMUM
    }
  }
  synchronise();
  if (lane() < args.rows) {
    float4 four = 0.0f;
    for (int j = 0; j < args.chunk / 4; ++j) four += scores[lane() * (args.chunk / 4) + j];
    const float denominator = (four.x + four.y) + (four.z + four.w);
    of_rows[lane()] = denominator;
    DENOMINATOR
  }
  unrolled for (int first = 0; first < args.rows; first += args.together) {
    unrolled for (int i = 0; i < args.each * args.together; ++i) {
      const int row = first + i % args.together;
      const int unit = column + i / args.together * args.columns;
      if (row < args.rows && unit < args.units && team < args.teams)
        ((shared UNIT*)scratch)[(i % args.together * args.teams + team) * args.units + unit] =
            sums[i / args.together * args.rows + row];
    }
    synchronise();
    for (int i = lane(); i < args.together * args.head_size; i += args.lanes) {
      const int row = first + i / args.head_size;
      const int token = first_token + row / args.heads;
      if (row < args.rows && token < args.tokens) {
        const int element = i % args.head_size;
        const int place = i / args.head_size * args.teams * args.head_size + element;
        float sum = 0.0f;
        for (int j = 0; j < args.teams; ++j)
          sum += ((shared float*)scratch)[place + j * args.head_size];
        const int head = first_head + row % args.heads;
        RESULT
      }
    }
    synchronise();
  }
)";

constexpr const char* kQuery = R"(
  for (int i = lane(); i < args.rows * args.units; i += args.lanes) {
    const int of_tile = i / args.units;
    const int token = min(first_token + of_tile / args.heads, args.tokens - 1);
    const int head = first_head + of_tile % args.heads;
    const int element = i % args.units * args.width;
    query[i] = args.query_heads.READ(PLACE_OF_ROW) * args.scale;
  }
)";

// Only a row without keys has a denominator of 0: otherwise the largest weight is 1.
constexpr const char* kMean = R"(
        const float denominator = of_rows[row];
        args.y.Write(denominator == 0.0f ? 0.0f : sum / denominator, PLACE_OF_ROW);
)";
// With has_parts: a work-group has a part of the keys, and writes the softmax's state beside its
// sum.
constexpr const char* kPart = R"(
  const int part = group(2);
  const int portion = (end - begin + args.parts - 1) / args.parts;
  begin += part * portion;
  end = min(end, begin + portion);
)";
constexpr const char* kSum = R"(
        args.y.Write(sum, part, head * args.head_size + element);
)";
constexpr const char* kMaximum = R"(
      if (slot % args.chunk == 0)
        args.states.Write(maxima[i], part, first_head + slot / args.chunk, 0);
)";
constexpr const char* kDenominator = R"(
    args.states.Write(denominator, part, first_head + lane(), 1);
)";

// Added to one of a row's shares. A sink far above all scores makes it infinite and the output 0,
// as its weight does then. A row without keys stays 0.
constexpr const char* kSink = R"(
          + (slot % args.chunk == 0 && maxima[i] > -INFINITY
                 ? exp(args.sinks.Read(first_head + slot / args.chunk % args.heads) - maxima[i])
                 : 0.0f))";

// ADD: for each row, its weight, which is a component of a float4, times the value.
std::string add_of(const Plan& plan) {
  std::string text;
  for (std::int64_t row = 0; row < plan.rows; ++row) {
    const std::int64_t quad = row / kWide;
    if (row % kWide == 0)
      text += text_of("const float4 weight", quad, " = weights[place + ", quad, "];\n            ");
    text += text_of("sums[j * args.rows + ", row, "] += weight", quad, ".", "xyzw"[row % kWide],
                    " * values[i];\n            ");
  }
  return text;
}

}  // namespace

KernelDescription flow_attention(const AttentionShape& shape) {
  const std::string batch = "batches";
  const std::string tokens = "tokens";
  const std::vector<Size> cache{batch, shape.kv_heads, std::string("capacity"), shape.head_size};
  const std::vector<Size> heads{batch, tokens, shape.heads * shape.head_size};
  const Plan plan = plan_of(shape);
  const bool is_wide = plan.width > 1;
  const std::string body = attention_text(
      shape, replaced(kBody, {{"QUERY", shape.appends ? append_of_token(shape) : kQuery},
                              {"NEWEST_SCORE", shape.appends ? newest_score() : ""},
                              {"NEWEST_VALUE", shape.appends ? newest_value() : "0.0f"},
                              {"PART", shape.has_parts ? kPart : ""},
                              {"TOTAL", is_wide ? "(dot_of_unit.x + dot_of_unit.y) + "
                                                  "(dot_of_unit.z + dot_of_unit.w)"
                                                : "dot_of_unit"},
                              {"ADD", add_of(plan)},
                              {"RESULT", shape.has_parts ? kSum : kMean},
                              {"MAXIMUM", shape.has_parts ? kMaximum : ""},
                              {"DENOMINATOR", shape.has_parts ? kDenominator : ""},
                              {"ROW_OF_CACHE", row_of_cache(shape.is_paged, "place")},
                              {"SINK", shape.has_sinks && !shape.has_parts ? kSink : ""},
                              {"UNIT", is_wide ? "float4" : "float"},
                              {"READ", is_wide ? "ReadFloats" : "Read"}}));
  std::vector<TensorDescription> tensors{
      {.name = "query_heads", .element = Element::kActivation, .sizes = heads},
      {.name = "key", .element = shape.cache, .sizes = cache},
      {.name = "value_rows", .element = shape.cache, .sizes = cache}};
  if (!shape.one_sequence)
    tensors.push_back({.name = "rows", .element = Element::kInt32, .sizes = {batch, 3}});
  if (shape.has_blocks)
    tensors.push_back({.name = "ends", .element = Element::kInt32, .sizes = {tokens}});
  std::vector<std::string> parameters{tokens, "capacity", "window"};
  if (shape.one_sequence) parameters.insert(parameters.begin(), {"first", "before"});
  if (shape.has_parts) {
    tensors.push_back({.name = "y",
                       .access = Access::kWrite,
                       .sizes = {std::string("parts"), shape.heads * shape.head_size}});
    tensors.push_back(states_of(shape, Access::kWrite));
    parameters.push_back("parts");
  } else {
    tensors.push_back(
        {.name = "y", .element = Element::kActivation, .access = Access::kWrite, .sizes = heads});
  }
  KernelDescription kernel{.name = "flow_attention",
                           .body = body,
                           .tensors = std::move(tensors),
                           .constants = {{"per_group", shape.heads_per_group()},
                                         {"head_size", shape.head_size},
                                         {"softcap", shape.softcap},
                                         {"causal", std::int64_t{shape.causal ? 1 : 0}},
                                         {"shares", kShares},
                                         {"passes", kPasses},
                                         {"width", plan.width},
                                         {"units", plan.units},
                                         {"heads", plan.heads},
                                         {"blocks", plan.blocks},
                                         {"tile", plan.tile},
                                         {"rows", plan.rows},
                                         {"row_quads", plan.row_quads()},
                                         {"chunk", plan.chunk},
                                         {"slots", plan.slots},
                                         {"ahead", plan.ahead},
                                         {"columns", plan.columns},
                                         {"each", plan.each},
                                         {"teams", plan.teams},
                                         {"values", plan.values},
                                         {"padded", plan.padded},
                                         {"scratch", plan.scratch},
                                         {"together", plan.together},
                                         {"scale", shape.scale}},
                           .parameters = std::move(parameters),
                           .lanes = shape.lanes};
  if (shape.appends) set_tensors_of_append(shape, plan.rows, kernel);
  if (shape.is_whole) set_tensors_of_whole(shape, kernel);
  set_mask(shape, kernel);
  if (shape.has_sinks && !shape.has_parts) kernel.tensors.push_back(sinks_of(shape));
  if (shape.is_paged) add_pages(kernel);
  return kernel;
}

Grid flow_attention_grid(const AttentionShape& shape, std::int64_t batch, std::int64_t tokens) {
  const Plan plan = plan_of(shape);
  return {.groups = {shape.kv_heads * plan.blocks, q4nx::ceil_div(tokens, plan.tile), batch},
          .lanes = shape.lanes};
}

std::int64_t flow_attention_memory(const AttentionShape& shape) {
  AttentionShape in_tiles = shape;
  in_tiles.in_tiles = true;
  in_tiles.appends = false;
  return std::max(plan_of(shape).float4s(), plan_of(in_tiles).float4s()) * kWide *
         static_cast<std::int64_t>(sizeof(float));
}

std::int64_t attention_lanes(const DeviceFacts& facts) {
  std::int64_t lanes = AttentionShape{}.lanes;
  while (lanes > kLeastLanes && lanes > facts.work_group) lanes /= 2;
  return lanes;
}

}  // namespace flownpu::gpu
