// SPDX-License-Identifier: Apache-2.0
#include "ops/stage_prices.h"

#include <algorithm>
#include <cmath>
#include <locale>
#include <ranges>
#include <sstream>

#include "ops/error.h"

namespace flownpu {
namespace {

// One part or more.
std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (std::size_t end = text.find(separator); end != text.npos; end = text.find(separator)) {
    parts.emplace_back(text.substr(0, end));
    text.remove_prefix(end + 1);
  }
  parts.emplace_back(text);
  return parts;
}

[[noreturn]] void refuse(std::string_view got) {
  fail(
      "[FlowNPU] option prices: expected tables such as 'measured seconds prompt=512 answer=127 | "
      "cpu 512=9 token=0.05' from `flownpu tune MODEL --write`, got '",
      got, "'");
}

// A finite number that is not negative, written as in C.
double parse_number(const std::string& text, const std::string& whole) {
  std::istringstream stream(text);
  stream.imbue(std::locale::classic());
  double number = -1;
  stream >> number;
  if (stream.fail() || !stream.eof() || !std::isfinite(number) || number < 0) refuse(whole);
  return number;
}

std::int64_t parse_count(const std::string& text, const std::string& whole) {
  constexpr double kMost = 1e9;
  const double number = parse_number(text, whole);
  if (number < 1 || number > kMost || number != std::floor(number)) refuse(whole);
  return static_cast<std::int64_t>(number);
}

// Words "a b c=1": calls word(a), word(b), and value(c, "1").
template <typename Word, typename Value>
void for_words(const std::string& text, const Word& word, const Value& value) {
  std::istringstream words(text);
  for (std::string each; words >> each;) {
    const std::size_t equals = each.find('=');
    if (equals == std::string::npos) {
      word(each);
    } else {
      value(each.substr(0, equals), each.substr(equals + 1));
    }
  }
}

PriceTable parse_table(const std::string& text) {
  PriceTable table;
  const std::vector<std::string> rows = split(text, '|');
  std::vector<std::string> heading;
  for_words(
      rows.front(), [&](const std::string& word) { heading.push_back(word); },
      [&](const std::string& key, const std::string& value) {
        if (key != "prompt" && key != "answer") refuse(text);
        (key == "prompt" ? table.prompt : table.answer) = parse_count(value, text);
      });
  if (heading.size() != 2 || (heading[1] != "seconds" && heading[1] != "joules")) refuse(text);
  table.source = heading[0];
  table.unit = heading[1];
  for (const std::string& row : rows | std::views::drop(1)) {
    StagePrices prices{.device = "", .prompts = {}, .token = -1};
    for_words(
        row,
        [&](const std::string& word) {
          if (!prices.device.empty()) refuse(text);
          prices.device = word;
        },
        [&](const std::string& key, const std::string& value) {
          (key == "token" ? prices.token : prices.prompts[parse_count(key, text)]) =
              parse_number(value, text);
        });
    if (prices.device == "switch") {
      table.switches = std::move(prices.prompts);
      continue;
    }
    if (prices.device.empty() || prices.token < 0 || !prices.prompts.contains(table.prompt))
      refuse(text);
    table.devices.push_back(std::move(prices));
  }
  if (table.devices.empty() || table.answer == 0) refuse(text);
  return table;
}

// See StageChoice::threshold; nullopt: not even the longest prompt is cheaper on the first.
std::optional<std::int64_t> threshold_of(const StagePrices& first, const StagePrices& second,
                                         const PromptPrices& switches) {
  std::optional<std::int64_t> found;
  for (const auto& [tokens, price] : std::views::reverse(first.prompts)) {
    const auto other = second.prompts.find(tokens);
    const auto hand_over = switches.find(tokens);
    if (other == second.prompts.end() || hand_over == switches.end()) continue;
    if (tokens < 2 || price + hand_over->second >= other->second) break;
    found = tokens;
  }
  return found;
}

}  // namespace

std::vector<PriceTable> parse_prices(std::string_view text) {
  std::vector<PriceTable> tables;
  for (const std::string& table : split(text, ';')) tables.push_back(parse_table(table));
  return tables;
}

StageChoice choose_stages(const PriceTable& table) {
  struct Candidate {
    std::string device;
    double cost = 0;
    std::optional<std::int64_t> threshold;
  };
  std::vector<Candidate> candidates;
  for (const StagePrices& first : table.devices) {
    for (const StagePrices& second : table.devices) {
      const double cost =
          first.prompts.at(table.prompt) + static_cast<double>(table.answer) * second.token;
      if (&first == &second) {
        candidates.push_back({first.device, cost, std::nullopt});
        continue;
      }
      const auto threshold = threshold_of(first, second, table.switches);
      if (threshold && *threshold <= table.prompt && table.switches.contains(table.prompt)) {
        candidates.push_back({first.device + "+" + second.device,
                              cost + table.switches.at(table.prompt), threshold});
      }
    }
  }
  std::ranges::stable_sort(candidates, {}, &Candidate::cost);
  StageChoice choice{candidates.front().device, candidates.front().threshold, {}};
  for (const Candidate& each : candidates) choice.costs.emplace_back(each.device, each.cost);
  return choice;
}

}  // namespace flownpu
