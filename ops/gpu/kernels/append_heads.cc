// SPDX-License-Identifier: Apache-2.0
// QK-norm, rotation and append in one kernel, as ML Drift fuses them. A work-group has one head of
// one token, a lane every 64th element of it. In an int8 cache each row is codes with one scale
// (ops/definitions/int8_cache.py), so that the head's largest magnitude has to be found first.
//
// A single token's attention does the same before it begins (append_of_token): a token so has a
// kernel less, whose launch takes longer than its work. Each work-group of flow_attention rotates
// its own queries and the key of its KV head, and one of them writes key and value to the cache.
// None reads them from there: the softmax begins with them, rounded as the cache rounds.
#include <limits>

#include "ops/gpu/kernels/kernels.h"
#include "ops/gpu/kernels/pieces.h"
#include "ops/gpu/language/text.h"

namespace flownpu::gpu {
namespace {

constexpr std::int64_t kLanes = 64;

// NORM sets `inverse`; WEIGHTED(i) is element i of the head, normalised. KEEP writes `element` i of
// a key or value to the cache. For int8 rows KEEP only keeps the element, and STORE writes the row
// when all elements are known; KEEPING declares the memory for that.
constexpr const char* kBody = R"(
  const int head = group(0);
  const int row = args.first + group(1);
  const int position = args.past + group(1);
  const int cache_row = ROW_OF_CACHE;
  const int turned_by = args.turn + group(1);
  const int front = head * args.head_size;
  const int is_key = head < args.heads + args.kv_heads;
  const int kv = head - args.heads - (is_key ? 0 : args.kv_heads);
  NORM
  KEEPING
  for (int i = lane(); i < args.head_size; i += args.lanes) {
    float element;
    if (is_key) {
      element = WEIGHTED(i);
      if (i < 2 * args.half) {
        const int pair = i % args.half;
        const int other = i < args.half ? i + args.half : i - args.half;
        const float turned = WEIGHTED(other) * args.sin.Read(turned_by, pair);
        element = element * args.cos.Read(turned_by, pair) + (i < args.half ? -turned : turned);
      }
    } else {
      element = args.packed.Read(row, front + i);
    }
    if (head < args.heads) {
      args.query.Write(element * args.scale, row, front + i);
    } else {
      KEEP
    }
  }
  STORE
)";

constexpr const char* kKeepFloat = R"(
      if (is_key) {
        args.key.Write(element, kv, cache_row, i);
      } else {
        args.value_rows.Write(element, kv, cache_row, i);
      }
)";

constexpr const char* kKeepingRow = R"(
  shared float magnitudes[args.lanes];
  float kept[args.each];
  float largest = 0.0f;
)";
// Once the largest is NaN, it stays NaN.
constexpr const char* kKeepRow = R"(
      kept[i / args.lanes] = element;
      const float magnitude = fabs(element);
      largest = isnan(largest) || magnitude <= largest ? largest : magnitude;
)";
// A scale that is not finite becomes NaN, and one that is not a normal number becomes 0. All lanes
// of a work-group have the same head, so they take the same branch, with its barriers.
constexpr const char* kStoreRow = R"(
  if (head >= args.heads) {
    magnitudes[lane()] = largest;
    synchronise();
    for (int step = args.lanes / 2; step > 0; step /= 2) {
      if (lane() < step) {
        const float mine = magnitudes[lane()];
        const float other = magnitudes[lane() + step];
        magnitudes[lane()] = isnan(mine) || other <= mine ? mine : other;
      }
      synchronise();
    }
    float row_scale = from_bfloat16(to_bfloat16(magnitudes[0] / 127.0f));
    if (!isfinite(row_scale)) row_scale = NAN;
    if (row_scale < args.smallest) row_scale = 0.0f;
    for (int i = lane(); i < args.head_size; i += args.lanes) {
      const int code = row_scale > 0.0f ? convert_int_rte(kept[i / args.lanes] / row_scale) : 0;
      if (is_key) {
        args.key.Write(code, kv, cache_row, i);
      } else {
        args.value_rows.Write(code, kv, cache_row, i);
      }
    }
    if (lane() == 0) {
      if (is_key) {
        args.key.WriteScale(row_scale, kv, cache_row);
      } else {
        args.value_rows.WriteScale(row_scale, kv, cache_row);
      }
    }
  }
)";

constexpr const char* kNorm = R"(
  shared float squares[args.lanes];
  float square = 0.0f;
  for (int i = lane(); i < args.head_size; i += args.lanes) {
    const float x = args.packed.Read(row, front + i);
    square += x * x;
  }
  squares[lane()] = square;
  synchronise();
  for (int step = args.lanes / 2; step > 0; step /= 2) {
    if (lane() < step) squares[lane()] += squares[lane() + step];
    synchronise();
  }
  const float inverse = 1.0f / sqrt(squares[0] / (float)args.head_size + args.epsilon);
)";

std::string weighted(const std::string& i, bool qk_norm) {
  std::string given = "args.packed.Read(row, front + " + i + ")";
  if (!qk_norm) return given;
  return "(" + given + " * inverse * (head < args.heads ? args.q_norm.Read(" + i +
         ") : args.k_norm.Read(" + i + ")))";
}

std::string body_of(bool qk_norm, bool in_rows, bool is_paged) {
  return replaced(kBody, {{"NORM", qk_norm ? kNorm : ""},
                          {"ROW_OF_CACHE", row_of_cache(is_paged, "position")},
                          {"KEEPING", in_rows ? kKeepingRow : ""},
                          {"WEIGHTED(other)", weighted("other", qk_norm)},
                          {"WEIGHTED(i)", weighted("i", qk_norm)},
                          {"KEEP", in_rows ? kKeepRow : kKeepFloat},
                          {"STORE", in_rows ? kStoreRow : ""}});
}

// Rows 0 to args.rows - 1 are the work-group's queries, row args.rows is the key. NORM makes
// sixteenths[16 row] the inverse of a row's root mean square. KEEP rounds `newest`, which are key
// and value, and writes them if the work-group is the first of its KV head.
constexpr const char* kAppendOfToken = R"(
  shared UNIT newest[2 * args.units];
  shared float sixteenths[args.sixteenths];
  const int has_newest = group(2) == 0;
  const int writes = has_newest && group(0) % args.blocks == 0;
  const int cache_row = ROW_OF_CACHE;
  const int value_front = (args.all_heads + args.kv_heads + kv) * args.head_size;
  NORM
  for (int i = lane(); i < (args.rows + 1) * args.head_size; i += args.lanes) {
    const int row = i / args.head_size;
    const int is_key = row == args.rows;
    const int element = i % args.head_size;
    const int front = (is_key ? args.all_heads + kv : first_head + row) * args.head_size;
    float rotated = WEIGHTED(element);
    if (element < 2 * args.half) {
      const int pair = element % args.half;
      const int other = element < args.half ? element + args.half : element - args.half;
      const float turned = WEIGHTED(other) * args.sin.Read(args.turn, pair);
      rotated = rotated * args.cos.Read(args.turn, pair) + (element < args.half ? -turned : turned);
    }
    if (is_key) {
      ((shared float*)newest)[element] = rotated;
    } else {
      ((shared float*)query)[i] = rotated * args.scale;
    }
  }
  for (int i = lane(); i < args.head_size; i += args.lanes)
    ((shared float*)newest)[args.head_size + i] = args.packed.Read(first_row, value_front + i);
  synchronise();
  KEEP
  synchronise();
  if (lane() < args.rows * args.shares) {
    float dot = 0.0f;
    for (int unit = lane() % args.shares; unit < args.units; unit += args.shares) {
      const UNIT dot_of_unit = query[lane() / args.shares * args.units + unit] * newest[unit];
      dot += TOTAL;
    }
    ((shared float*)scratch)[lane()] = dot;
  }
  synchronise();
)";

constexpr const char* kNormOfToken = R"(
  for (int row = 0; row <= args.rows; ++row) {
    const int front = (row == args.rows ? args.all_heads + kv : first_head + row) * args.head_size;
    float square = 0.0f;
    for (int i = lane(); i < args.head_size; i += args.lanes) {
      const float x = args.packed.Read(first_row, front + i);
      square += x * x;
    }
    ((shared float*)scratch)[row * args.lanes + lane()] = square;
  }
  synchronise();
  for (int i = lane(); i < (args.rows + 1) * 16; i += args.lanes) {
    float sum = 0.0f;
    for (int other = i % 16; other < args.lanes; other += 16)
      sum += ((shared float*)scratch)[i / 16 * args.lanes + other];
    sixteenths[i] = sum;
  }
  synchronise();
  if (lane() <= args.rows) {
    float sum = 0.0f;
    for (int i = 0; i < 16; ++i) sum += sixteenths[lane() * 16 + i];
    sixteenths[lane() * 16] = 1.0f / sqrt(sum / (float)args.head_size + args.epsilon);
  }
  synchronise();
)";

constexpr const char* kKeepFloatOfToken = R"(
  for (int i = lane(); i < 2 * args.head_size; i += args.lanes) {
    const float element = ROUNDED;
    ((shared float*)newest)[i] = element;
    if (writes) {
      if (i < args.head_size) {
        args.newest_key.Write(element, kv, cache_row, i);
      } else {
        args.newest_value.Write(element, kv, cache_row, i - args.head_size);
      }
    }
  }
)";

// The scales as above: 16 lanes join each side's largest magnitude.
constexpr const char* kKeepRowOfToken = R"(
  unrolled for (int side = 0; side < 2; ++side) {
    float largest = 0.0f;
    for (int i = lane(); i < args.head_size; i += args.lanes) {
      const float magnitude = fabs(((shared float*)newest)[side * args.head_size + i]);
      largest = isnan(largest) || magnitude <= largest ? largest : magnitude;
    }
    ((shared float*)scratch)[side * args.lanes + lane()] = largest;
  }
  synchronise();
  if (lane() < 32) {
    float largest = 0.0f;
    for (int other = lane() % 16; other < args.lanes; other += 16) {
      const float magnitude = ((shared float*)scratch)[lane() / 16 * args.lanes + other];
      largest = isnan(largest) || magnitude <= largest ? largest : magnitude;
    }
    sixteenths[lane()] = largest;
  }
  synchronise();
  unrolled for (int side = 0; side < 2; ++side) {
    float largest = 0.0f;
    for (int i = 0; i < 16; ++i) {
      const float magnitude = sixteenths[side * 16 + i];
      largest = isnan(largest) || magnitude <= largest ? largest : magnitude;
    }
    float row_scale = from_bfloat16(to_bfloat16(largest / 127.0f));
    if (!isfinite(row_scale)) row_scale = NAN;
    if (row_scale < args.smallest) row_scale = 0.0f;
    for (int i = lane(); i < args.head_size; i += args.lanes) {
      const float element = ((shared float*)newest)[side * args.head_size + i];
      const int code = row_scale > 0.0f ? convert_int_rte(element / row_scale) : 0;
      ((shared float*)newest)[side * args.head_size + i] = row_scale * (float)code;
      if (writes) {
        if (side == 0) {
          args.newest_key.Write(code, kv, cache_row, i);
        } else {
          args.newest_value.Write(code, kv, cache_row, i);
        }
      }
    }
    if (writes && lane() == 0) {
      if (side == 0) {
        args.newest_key.WriteScale(row_scale, kv, cache_row);
      } else {
        args.newest_value.WriteScale(row_scale, kv, cache_row);
      }
    }
  }
)";

// An element of `newest` as the cache holds it.
std::string rounded(Element cache) {
  const std::string element = "((shared float*)newest)[i]";
  if (cache == Element::kBFloat16) return "from_bfloat16(to_bfloat16(" + element + "))";
  return cache == Element::kFloat16 ? "rounded_to_half(" + element + ")" : element;
}

}  // namespace

std::string append_of_token(const AttentionShape& shape) {
  const bool in_rows = shape.cache == Element::kInt8Rows;
  std::string body =
      replaced(kAppendOfToken, {{"NORM", shape.qk_norm ? kNormOfToken : ""},
                                {"ROW_OF_CACHE", row_of_cache(shape.is_paged, "past")},
                                {"KEEP", in_rows ? kKeepRowOfToken : kKeepFloatOfToken},
                                {"ROUNDED", rounded(shape.cache)}});
  for (const char* element : {"element", "other"}) {
    const std::string given = text_of("args.packed.Read(first_row, front + ", element, ")");
    const std::string weighted =
        text_of("(", given, " * sixteenths[row * 16] * (is_key ? args.k_norm.Read(", element,
                ") : args.q_norm.Read(", element, ")))");
    body = replaced(body, text_of("WEIGHTED(", element, ")"), shape.qk_norm ? weighted : given);
  }
  return body;
}

// A score that is not a number makes the denominator none, too.
const char* newest_score() {
  return R"(
    const int newest_row = min((lane() + i * args.lanes) / args.chunk, args.rows - 1);
    const float4 parts_of_score = scratch[newest_row * 2] + scratch[newest_row * 2 + 1];
    float newest_score = (parts_of_score.x + parts_of_score.y) + (parts_of_score.z + parts_of_score.w);
    if (args.softcap > 0.0f) newest_score = args.softcap * tanh(newest_score / args.softcap);
    if (has_newest) {
      maxima[i] = newest_score;
      denominators[i] = (lane() + i * args.lanes) % args.chunk == 0 ? exp(newest_score - newest_score) : 0.0f;
    }
)";
}

const char* newest_value() {
  return "has_newest && team == 0 ? newest[args.units + min(column + i / args.rows * args.columns, "
         "args.units - 1)] : (UNIT)(0.0f)";
}

void set_tensors_of_append(const AttentionShape& shape, std::int64_t rows,
                           KernelDescription& kernel) {
  const std::int64_t size = shape.head_size;
  const std::string positions = "positions";
  kernel.tensors.front() = {
      .name = "packed",
      .element = Element::kActivation,
      .sizes = {std::string("tokens"), (shape.heads + 2 * shape.kv_heads) * size}};
  for (const char* name : {"cos", "sin"})
    kernel.tensors.push_back({.name = name, .sizes = {positions, shape.half()}});
  for (const char* name : {"newest_key", "newest_value"})
    kernel.tensors.push_back({.name = name,
                              .element = shape.cache,
                              .access = Access::kWrite,
                              .sizes = {shape.kv_heads, std::string("capacity"), size}});
  for (const char* name : {"q_norm", "k_norm"})
    if (shape.qk_norm) kernel.tensors.push_back({.name = name, .sizes = {size}});
  kernel.constants.insert({{"all_heads", shape.heads},
                           {"kv_heads", shape.kv_heads},
                           {"half", shape.half()},
                           {"epsilon", shape.epsilon},
                           {"sixteenths", kSixteenths * (rows + 1)},
                           {"smallest", std::numeric_limits<float>::min()}});
  kernel.parameters.emplace_back("turn");
}

KernelDescription append_heads(const HeadsShape& shape) {
  const std::string tokens = "tokens";
  const std::string positions = "positions";
  const std::int64_t packed = (shape.heads + 2 * shape.kv_heads) * shape.head_size;
  const std::vector<Size> cache{shape.kv_heads, std::string("capacity"), shape.head_size};
  const bool in_rows = shape.cache == Element::kInt8Rows;
  KernelDescription kernel{
      .name = "append_heads",
      .body = body_of(shape.qk_norm, in_rows, shape.is_paged),
      .tensors = {{.name = "packed", .element = Element::kActivation, .sizes = {tokens, packed}},
                  {.name = "cos", .sizes = {positions, shape.half()}},
                  {.name = "sin", .sizes = {positions, shape.half()}},
                  {.name = "query",
                   .element = Element::kActivation,
                   .access = Access::kWrite,
                   .sizes = {tokens, shape.heads * shape.head_size}},
                  {.name = "key", .element = shape.cache, .access = Access::kWrite, .sizes = cache},
                  {.name = "value_rows",
                   .element = shape.cache,
                   .access = Access::kWrite,
                   .sizes = cache}},
      .constants = {{"heads", shape.heads},
                    {"kv_heads", shape.kv_heads},
                    {"head_size", shape.head_size},
                    {"half", shape.half()},
                    {"scale", shape.scale},
                    {"epsilon", shape.epsilon}},
      .parameters = {"first", "past", "turn", "capacity"},
      .lanes = kLanes};
  if (in_rows) {
    kernel.constants["each"] = q4nx::ceil_div(shape.head_size, kLanes);
    kernel.constants["smallest"] = std::numeric_limits<float>::min();
  }
  if (shape.qk_norm) {
    kernel.tensors.push_back({.name = "q_norm", .sizes = {shape.head_size}});
    kernel.tensors.push_back({.name = "k_norm", .sizes = {shape.head_size}});
  }
  if (shape.is_paged) add_pages(kernel);
  return kernel;
}

Grid append_heads_grid(const HeadsShape& shape, std::int64_t tokens) {
  return {.groups = {shape.heads + 2 * shape.kv_heads, tokens, 1}, .lanes = kLanes};
}

}  // namespace flownpu::gpu
