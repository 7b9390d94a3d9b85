// SPDX-License-Identifier: Apache-2.0
// The forms of flow_attention: where keys begin and end; the kernel that merges parts; its tensors
// if all keys are given with the queries, by head [b, heads, t, head_size] or by token [b, t, heads
// head_size]; its sinks; its mask, of which each size may be 1; and the pages of a paged cache.
#include <utility>

#include "ops/gpu/kernels/pieces.h"

namespace flownpu::gpu {
namespace {

// A number is added, or, where there is none, the key is hidden if the mask's byte is 0.
constexpr const char* kMask = R"(
        if (is_seen) {
          const int row = slot / args.chunk;
          const int head = first_head + row % args.heads;
          const int token = min(first_token + row / args.heads, args.tokens - 1);
          const MASKED mask = args.mask.Read(batch % args.mask_batches, head % args.mask_heads,
                                             token % args.mask_rows, (start + key) % args.mask_keys);
          score = APPLIED;
        }
)";

constexpr const char* kLengthsOfBatch = R"(
  const int batch = group(2);
  const int past = args.rows.Read(batch, 0);
  const int valid = args.rows.Read(batch, 1);
  const int base = args.rows.Read(batch, 2);
  const int first_row = 0;
)";
constexpr const char* kLengthsOfSequence = R"(
  const int batch = 0;
  const int past = args.before;
  const int valid = args.tokens;
  const int base = 0;
  const int first_row = args.first;
)";

// A causal token sees the keys up to its own place.
constexpr const char* kLengthsOfWhole = R"(
  const int batch = group(2);
  const int past = args.causal ? 0 : args.capacity - args.tokens;
  const int valid = args.tokens;
  const int base = 0;
  const int first_row = 0;
)";

// The keys that a token sees, from `from` to `to`; none for a token that is padding.
constexpr const char* kRange = R"(
    int from = base;
    int to = past + SEEN;
    if (args.window > 0) from = max(from, past + token + 1 - args.window);
    if (token >= valid) to = from;
)";

// A part without keys has a denominator of 0 and a maximum of -INFINITY, so that it adds nothing.
constexpr const char* kMergeBody = R"(
  const int head = group(0);
  float maximum = -INFINITY;
  for (int part = 0; part < args.parts; ++part)
    maximum = fmax(maximum, args.states.Read(part, head, 0));
  float denominator = 0.0f;
  for (int part = 0; part < args.parts; ++part)
    denominator += exp(args.states.Read(part, head, 0) - maximum) * args.states.Read(part, head, 1);
  SINK
  for (int i = lane(); i < args.head_size; i += args.lanes) {
    float sum = 0.0f;
    for (int part = 0; part < args.parts; ++part)
      sum += exp(args.states.Read(part, head, 0) - maximum) *
             args.sums.Read(part, head * args.head_size + i);
    args.y.Write(sum / denominator, args.first, head * args.head_size + i);
  }
)";

// Work-items of merge_attention.
constexpr std::int64_t kMergeLanes = 64;

}  // namespace

std::string attention_text(const AttentionShape& shape, std::string text) {
  const char* lengths = shape.one_sequence ? kLengthsOfSequence : kLengthsOfBatch;
  const char* seen = shape.appends      ? "0"  // the token's own key comes first
                     : shape.has_blocks ? "args.ends.Read(first_row + min(token, args.tokens - 1))"
                     : shape.is_whole ? "min(args.causal ? token + 1 : valid, args.capacity - past)"
                                      : "(args.causal ? token + 1 : valid)";
  const bool by_tokens = shape.is_whole && !shape.by_head;
  return replaced(std::move(text),
                  {{"LENGTHS", shape.is_whole ? kLengthsOfWhole : lengths},
                   {"RANGE", kRange},
                   {"SEEN", seen},
                   {"PLACE_OF_ROW",
                    shape.by_head ? "batch, head, token, element"
                                  : "batch, first_row + token, head * args.head_size + element"},
                   {"PLACE_OF_KEY", by_tokens ? "batch, key, kv * args.head_size + element"
                                              : "batch, kv, key, element"}});
}

void set_mask(const AttentionShape& shape, KernelDescription& kernel) {
  const bool is_float = shape.mask != Element::kInt8;
  std::string text = shape.has_mask ? kMask : "";
  text = replaced(text, "MASKED", is_float ? "float" : "int");
  text = replaced(text, "APPLIED", is_float ? "score + mask" : "mask != 0 ? score : -INFINITY");
  kernel.body =
      replaced(kernel.body, "UNMASKED", shape.has_mask ? "&& slot_scores[i] > -INFINITY" : "");
  kernel.body = replaced(kernel.body, "MASK", text);
  if (!shape.has_mask) return;
  const std::vector<std::string> of_mask{"mask_batches", "mask_heads", "mask_rows", "mask_keys"};
  kernel.tensors.push_back(
      {.name = "mask", .element = shape.mask, .sizes = {of_mask.begin(), of_mask.end()}});
  kernel.parameters.insert(kernel.parameters.end(), of_mask.begin(), of_mask.end());
}

void set_tensors_of_whole(const AttentionShape& shape, KernelDescription& kernel) {
  const auto sizes = [&](const char* tokens, std::int64_t heads) {
    return shape.by_head ? std::vector<Size>{"batches", heads, tokens, shape.head_size}
                         : std::vector<Size>{"batches", tokens, heads * shape.head_size};
  };
  const auto tensor = [&](const char* name, std::vector<Size> of) {
    return TensorDescription{.name = name, .element = shape.cache, .sizes = std::move(of)};
  };
  kernel.tensors = {tensor("query_heads", sizes("tokens", shape.heads)),
                    tensor("key", sizes("capacity", shape.kv_heads)),
                    tensor("value_rows", sizes("capacity", shape.kv_heads)),
                    tensor("y", sizes("tokens", shape.heads))};
  kernel.tensors.back().access = Access::kWrite;
}

std::string row_of_cache(bool is_paged, const std::string& position) {
  if (!is_paged) return position;
  return "args.pages.Read(args.sequence, " + position + " / args.page) * args.page + " + position +
         " % args.page";
}

void add_pages(KernelDescription& kernel) {
  kernel.tensors.push_back({.name = "pages",
                            .element = Element::kInt32,
                            .sizes = {std::string("sequences"), std::string("columns")}});
  for (const char* name : {"sequence", "columns", "page"}) kernel.parameters.emplace_back(name);
}

TensorDescription states_of(const AttentionShape& shape, Access access) {
  return {.name = "states",
          .access = access,
          .sizes = {std::string("parts"), shape.heads, std::int64_t{2}}};
}

TensorDescription sinks_of(const AttentionShape& shape) {
  return {.name = "sinks", .sizes = {shape.heads}};
}

KernelDescription merge_attention(const AttentionShape& shape) {
  const std::int64_t width = shape.heads * shape.head_size;
  KernelDescription kernel{
      .name = "merge_attention",
      .body =
          replaced(kMergeBody, "SINK",
                   shape.has_sinks ? "denominator += exp(args.sinks.Read(head) - maximum);" : ""),
      .tensors = {{.name = "sums", .sizes = {std::string("parts"), width}},
                  states_of(shape, Access::kRead),
                  {.name = "y",
                   .element = Element::kActivation,
                   .access = Access::kWrite,
                   .sizes = {std::string("tokens"), width}}},
      .constants = {{"head_size", shape.head_size}},
      .parameters = {"first", "parts"},
      .lanes = kMergeLanes};
  if (shape.has_sinks) kernel.tensors.push_back(sinks_of(shape));
  return kernel;
}

Grid merge_attention_grid(const AttentionShape& shape) {
  return {.groups = {shape.heads, 1, 1}, .lanes = kMergeLanes};
}

}  // namespace flownpu::gpu
