// SPDX-License-Identifier: Apache-2.0
// The cheapest devices of a conversation, by measured or predicted prices: one for all of it, or
// one that reads prompts and another that writes tokens.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace flownpu {

// By a prompt's number of new tokens.
using PromptPrices = std::map<std::int64_t, double>;

struct StagePrices {
  std::string device;
  PromptPrices prompts;  // up to the first token
  double token = 0;      // each further token
};

// Prices of a model, all in one unit.
struct PriceTable {
  std::string source;  // "measured" or "predicted"
  std::string unit;    // "seconds" or "joules"
  // The conversation that is compared: a prompt, and the tokens after its first answered one.
  std::int64_t prompt = 0;
  std::int64_t answer = 0;
  std::vector<StagePrices> devices;  // each has a price for `prompt`
  // The hand-over of keys and values to another device. Empty: pairs of devices are no choice.
  PromptPrices switches;
};

struct StageChoice {
  std::string device;  // "gpu", or "npu+gpu": the first reads prompts
  // From how many new tokens on a run is the first one's: the least length from which on all that
  // have prices are cheaper there, each with a switch to it. Nullopt with one device.
  std::optional<std::int64_t> threshold;
  // The conversation's, by device or pair, the cheapest first.
  std::vector<std::pair<std::string, double>> costs;
};

// Tables as the provider's option `prices` has them, separated by ';':
// "measured seconds prompt=512 answer=127 | cpu 4=0.2 512=9 token=0.05 | gpu .. | switch 512=0.1".
// Throws Error for any other text.
std::vector<PriceTable> parse_prices(std::string_view text);

// `table` has a device or more.
StageChoice choose_stages(const PriceTable& table);

}  // namespace flownpu
