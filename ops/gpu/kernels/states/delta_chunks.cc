// SPDX-License-Identifier: Apache-2.0
// The gated delta rule for a prompt, in chunks of 16 tokens. G_i is the sum of a chunk's decays up
// to token i, S the state before the chunk; k and q are divided by their lengths if they are
// packed:
//   A_ij = share_i e^(G_i - G_j) k_i . k_j for j < i;         T = (I + A)^-1 diag(share)
//   P_ij = scale e^(G_i - G_j) q_i . k_j for j <= i
//   d = T (v - e^G S^T k);   y = scale e^G S^T q + P d
//   S' = e^(G_last) S + sum_i k_i (e^(G_last - G_i) d_i)^T
// (Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length").
//
// delta_pairs computes T, P and the factors of all chunks at once, a work-group for a chunk of a
// key head. No element of T is above 1: it is the part of a token's error that a unit of an earlier
// token's brings about, which later tokens never enlarge. gated_delta_chunks follows the chunks: a
// work-group has 32 columns of a head's state in its memory, and a lane 4 of these columns. For two
// tokens' keys and queries the lane multiplies 16 numbers of the state, 4 vectors, by 4 vectors of
// keys and queries, 64 products for 8 reads, and for the new state it adds 16 products to 16
// numbers for two reads.
//
// 16 tokens and 32 columns of a head of 128 x 128 are 217,000 multiply-adds, 100,000 reads of 4
// bytes from the work-group's memory and 5 barriers; in gated_delta 268,000, 262,000 and 18. The
// pairs are 16,000 multiply-adds more. A compute unit of RDNA 3 begins two multiply-adds for a
// read.
//
// Tokens behind the last count as tokens with a decay and a share of 0, which change nothing.
#include <algorithm>

#include "ops/gpu/kernels/pieces.h"
#include "ops/gpu/kernels/states/delta_tensors.h"
#include "ops/gpu/language/text.h"

namespace flownpu::gpu {
namespace {

constexpr std::int64_t kLanes = 64;
// Floats of a token in `pairs`: rows of T and P, and the factors of S^T k, of S^T q, of what the
// token adds to the state, and of the state.
constexpr std::int64_t kPair = 2 * kDeltaChunk + 4;

constexpr const char* kPairs = R"(
  const int start = group(1) * args.chunk;
  const int some = min(args.chunk, args.tokens - start);
  const int first_row = args.first + group(2) * args.tokens + start;
  const int place = group(2) * ((args.tokens + args.chunk - 1) / args.chunk) + group(1);
  shared float4 lines[2 * args.chunk * args.line];
  shared float dots[2 * args.chunk * args.chunk];
  shared float units[2 * args.chunk];
  shared float decays[args.chunk];
  shared float triangle[args.chunk * args.chunk];
  for (int i = lane(); i < 2 * args.chunk * args.line * 4; i += args.lanes) {
    const int token = i / (args.line * 4) % args.chunk;
    const int element = i % (args.line * 4);
    float value = 0.0f;
    if (element < args.key_size && token < some) {
      if (i < args.chunk * args.line * 4) {
        value = args.key.Read(first_row + token, args.front_of_keys + group(0) * args.key_size + element);
      } else {
        value = args.query.Read(first_row + token, group(0) * args.key_size + element);
      }
    }
    ((shared float*)lines)[i] = value;
  }
  synchronise();
  const int side = lane() / 32;
  const int down = lane() % 32 / 8;
  const int over = lane() % 8;
  float products[8];
  unrolled for (int i = 0; i < 8; ++i) products[i] = 0.0f;
  for (int quad = 0; quad < args.quads; ++quad) {
    const float4 left = lines[over * args.line + quad];
    const float4 right = lines[(over + 8) * args.line + quad];
    unrolled for (int i = 0; i < 4; ++i) {
      const float4 row = lines[(side * args.chunk + down + 4 * i) * args.line + quad];
      products[2 * i] += row.x * left.x + row.y * left.y + row.z * left.z + row.w * left.w;
      products[2 * i + 1] += row.x * right.x + row.y * right.y + row.z * right.z + row.w * right.w;
    }
  }
  unrolled for (int i = 0; i < 8; ++i)
    dots[(side * args.chunk + down + i / 2 * 4) * args.chunk + over + i % 2 * 8] = products[i];
  if (lane() < 2 * args.chunk) {
    float unit = 1.0f;
    if (args.is_packed == 1) {
      float square = 0.0f;
      for (int quad = 0; quad < args.quads; ++quad) {
        const float4 row = lines[lane() * args.line + quad];
        square += row.x * row.x + row.y * row.y + row.z * row.z + row.w * row.w;
      }
      unit = square > 0.0f ? 1.0f / sqrt(square) : 0.0f;
    }
    units[lane()] = lane() < args.chunk ? unit : unit * args.scale;
  }
  for (int of_key = 0; of_key < args.shared_by; ++of_key) {
    const int head = group(0) * args.shared_by + of_key;
    if (lane() < args.chunk)
      decays[lane()] = lane() < some ? args.decay.Read(first_row + min(lane(), some - 1), head) : 0.0f;
    synchronise();
    for (int i = lane(); i < args.chunk * args.chunk; i += args.lanes) {
      const int token = i / args.chunk;
      const int other = i % args.chunk;
      const float share = token < some ? args.share.Read(first_row + min(token, some - 1), head) : 0.0f;
      float between = 0.0f;
      for (int one = other + 1; one <= token; ++one) between += decays[one];
      const float factor = other <= token ? exp(between) * units[other] : 0.0f;
      triangle[i] = share * factor * units[token] * dots[i];
      args.pairs.Write(factor * units[args.chunk + token] * dots[args.chunk * args.chunk + i], place, head, token, args.chunk + other);
    }
    synchronise();
    if (lane() < args.chunk) {
      float column[args.chunk];
      unrolled for (int i = 0; i < args.chunk; ++i) {
        float sum = i == lane() ? 1.0f : 0.0f;
        unrolled for (int j = 0; j < i; ++j) sum -= triangle[i * args.chunk + j] * column[j];
        column[i] = sum;
      }
      const float share = lane() < some ? args.share.Read(first_row + min(lane(), some - 1), head) : 0.0f;
      unrolled for (int i = 0; i < args.chunk; ++i)
        args.pairs.Write(share * column[i], place, head, i, lane());
      float until = 0.0f;
      float behind = 0.0f;
      for (int i = 0; i < args.chunk; ++i) {
        if (i <= lane()) {
          until += decays[i];
        } else {
          behind += decays[i];
        }
      }
      const float kept = exp(until);
      args.pairs.Write(kept * units[lane()], place, head, lane(), 2 * args.chunk);
      args.pairs.Write(kept * units[args.chunk + lane()], place, head, lane(), 2 * args.chunk + 1);
      args.pairs.Write(exp(behind) * units[lane()], place, head, lane(), 2 * args.chunk + 2);
      args.pairs.Write(exp(until + behind), place, head, lane(), 2 * args.chunk + 3);
    }
    synchronise();
  }
)";

constexpr const char* kChunks = R"(
  const int head = group(0);
  const int first_column = group(1) * args.columns;
  const int chunks = (args.tokens + args.chunk - 1) / args.chunk;
  const int down = lane() / 8;
  const int over = lane() % 8;
  const int column = first_column + over * 4;
  shared float4 state[args.quads * args.columns];
  shared float4 lines[args.chunk * args.line];
  shared float4 errors[args.chunk * 8];
  shared float4 changes[args.chunk * 8];
  shared float pairs[args.chunk * args.pair];
  for (int i = lane(); i < args.quads * 4 * args.columns; i += args.lanes) {
    const int key = i / args.columns;
    const int own = min(first_column + i % args.columns, args.value_size - 1);
    ((shared float*)state)[i] = key < args.key_size ? args.before.Read(group(2), head, min(key, args.key_size - 1), own) : 0.0f;
  }
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int first_row = args.first + group(2) * args.tokens + chunk * args.chunk;
    const int some = min(args.chunk, args.tokens - chunk * args.chunk);
    for (int i = lane(); i < args.chunk * args.line * 4; i += args.lanes) {
      const int token = i / (args.line * 4);
      const int element = i % (args.line * 4);
      float value = 0.0f;
      if (element < args.key_size && token < some)
        value = args.key.Read(first_row + token, args.front_of_keys + head / args.shared_by * args.key_size + element);
      ((shared float*)lines)[i] = value;
    }
    for (int i = lane(); i < args.chunk * args.pair; i += args.lanes)
      pairs[i] = args.pairs.Read(group(2) * chunks + chunk, head, i / args.pair, i % args.pair);
    synchronise();
    float4 of_key[2];
    float4 of_query[2];
    unrolled for (int i = 0; i < 2; ++i) {
      of_key[i] = 0.0f;
      of_query[i] = 0.0f;
    }
    for (int quad = 0; quad < args.quads; ++quad) {
      const float4 first = state[quad * args.columns + over];
      const float4 second = state[quad * args.columns + 8 + over];
      const float4 third = state[quad * args.columns + 16 + over];
      const float4 fourth = state[quad * args.columns + 24 + over];
      unrolled for (int i = 0; i < 2; ++i) {
        const float4 key = lines[(down + 8 * i) * args.line + quad];
        const int row = first_row + min(down + 8 * i, some - 1);
        const float4 query = QUERY;
        of_key[i] += key.x * first + key.y * second + key.z * third + key.w * fourth;
        of_query[i] += query.x * first + query.y * second + query.z * third + query.w * fourth;
      }
    }
    unrolled for (int i = 0; i < 2; ++i) {
      const int token = down + 8 * i;
      const int row = first_row + min(token, some - 1);
      const float4 value = VALUE;
      errors[token * 8 + over] = value - pairs[token * args.pair + 2 * args.chunk] * of_key[i];
    }
    synchronise();
    float4 change[2];
    unrolled for (int i = 0; i < 2; ++i) {
      change[i] = 0.0f;
      for (int other = 0; other < args.chunk; ++other)
        change[i] += pairs[(down + 8 * i) * args.pair + other] * errors[other * 8 + over];
    }
    synchronise();
    unrolled for (int i = 0; i < 2; ++i) {
      const int token = down + 8 * i;
      changes[token * 8 + over] = change[i];
      errors[token * 8 + over] = pairs[token * args.pair + 2 * args.chunk + 2] * change[i];
    }
    synchronise();
    unrolled for (int i = 0; i < 2; ++i) {
      const int token = down + 8 * i;
      float4 sum = pairs[token * args.pair + 2 * args.chunk + 1] * of_query[i];
      for (int other = 0; other < args.chunk; ++other)
        sum += pairs[token * args.pair + args.chunk + other] * changes[other * 8 + over];
      const float values[4] = {sum.x, sum.y, sum.z, sum.w};
      unrolled for (int j = 0; j < 4; ++j) {
        if (token < some && column + j < args.value_size)
          args.y.Write(values[j], first_row + token, head * args.value_size + column + j);
      }
    }
    const float decay = pairs[2 * args.chunk + 3];
    for (int quad = down; quad < args.quads; quad += 8) {
      float4 rows[4];
      unrolled for (int i = 0; i < 4; ++i) rows[i] = decay * state[quad * args.columns + 8 * i + over];
      for (int token = 0; token < args.chunk; ++token) {
        const float4 key = lines[token * args.line + quad];
        const float4 added = errors[token * 8 + over];
        rows[0] += key.x * added;
        rows[1] += key.y * added;
        rows[2] += key.z * added;
        rows[3] += key.w * added;
      }
      unrolled for (int i = 0; i < 4; ++i) state[quad * args.columns + 8 * i + over] = rows[i];
    }
    synchronise();
  }
  for (int i = lane(); i < args.quads * 4 * args.columns; i += args.lanes) {
    const int key = i / args.columns;
    const int own = first_column + i % args.columns;
    if (key < args.key_size && own < args.value_size)
      args.behind.Write(((shared float*)state)[i], group(2), head, key, own);
  }
)";

// Four elements of row `row`, from `front` + `first` on; those behind a head's end are its last.
std::string four(const char* tensor, const char* front, const char* first, std::int64_t size) {
  std::string text;
  for (int i = 0; i < 4; ++i)
    text += text_of(i > 0 ? ", " : "(float4)(", "args.", tensor, ".Read(row, ", front, " + min(",
                    first, " + ", i, ", ", size - 1, "))");
  return text + ")";
}

std::int64_t quads_of(const DeltaShape& shape) { return q4nx::ceil_div(shape.key_size, 4); }

// A row of keys takes, in a work-group's memory, one vector of 4 more than it has, since lanes
// that each read another row would else read one bank.
std::int64_t line_of(const DeltaShape& shape) { return quads_of(shape) + 1; }

Constants constants_of_chunks(const DeltaShape& shape) {
  Constants constants = constants_of(shape);
  constants.insert({{"chunk", kDeltaChunk},
                    {"pair", kPair},
                    {"quads", quads_of(shape)},
                    {"line", line_of(shape)}});
  return constants;
}

TensorDescription pairs_of(const DeltaShape& shape, Access access) {
  return {.name = "pairs",
          .access = access,
          .sizes = {std::string("all_chunks"), shape.value_heads, kDeltaChunk, kPair}};
}

}  // namespace

bool takes_chunks(const DeltaShape& shape, std::int64_t tokens, std::int64_t local_memory) {
  // Needed by delta_pairs, whose lines are of keys and queries, and by gated_delta_chunks.
  const std::int64_t of_pairs = 8 * kDeltaChunk * line_of(shape) + 2 * kDeltaChunk * kDeltaChunk +
                                2 * kDeltaChunk + kDeltaChunk + kDeltaChunk * kDeltaChunk;
  const std::int64_t of_chunks = 4 * quads_of(shape) * kDeltaColumns +
                                 4 * kDeltaChunk * line_of(shape) +
                                 2 * kDeltaChunk * kDeltaColumns + kDeltaChunk * kPair;
  const auto bytes = static_cast<std::int64_t>(sizeof(float)) * std::max(of_pairs, of_chunks);
  return tokens >= kDeltaChunk && bytes <= local_memory;
}

std::int64_t delta_pairs_floats(const DeltaShape& shape, std::int64_t tokens,
                                std::int64_t sequences) {
  return sequences * q4nx::ceil_div(tokens, kDeltaChunk) * shape.value_heads * kDeltaChunk * kPair;
}

KernelDescription delta_pairs(const DeltaShape& shape) {
  return {.name = "delta_pairs",
          .body = kPairs,
          .tensors = {given(shape, "query"), given(shape, "key"), rates_of(shape, "decay"),
                      rates_of(shape, "share"), pairs_of(shape, Access::kWrite)},
          .constants = constants_of_chunks(shape),
          .parameters = {"first", "tokens"},
          .lanes = kLanes};
}

Grid delta_pairs_grid(const DeltaShape& shape, std::int64_t tokens, std::int64_t sequences) {
  return {.groups = {shape.key_heads, q4nx::ceil_div(tokens, kDeltaChunk), sequences},
          .lanes = kLanes};
}

KernelDescription gated_delta_chunks(const DeltaShape& shape) {
  const std::string query =
      four("query", "head / args.shared_by * args.key_size", "quad * 4", shape.key_size);
  const std::string value =
      four("value", "args.front_of_values + head * args.value_size", "column", shape.value_size);
  return {.name = "gated_delta_chunks",
          .body = replaced(kChunks, {{"QUERY", query}, {"VALUE", value}}),
          .tensors = {given(shape, "query"), given(shape, "key"), given(shape, "value"),
                      pairs_of(shape, Access::kRead), state_of(shape, "before", Access::kRead),
                      result_of(shape), state_of(shape, "behind", Access::kWrite)},
          .constants = constants_of_chunks(shape),
          .parameters = {"first", "tokens"},
          .lanes = kLanes};
}

Grid gated_delta_chunks_grid(const DeltaShape& shape, std::int64_t sequences) {
  return {.groups = {shape.value_heads, q4nx::ceil_div(shape.value_size, kDeltaColumns), sequences},
          .lanes = kLanes};
}

}  // namespace flownpu::gpu
