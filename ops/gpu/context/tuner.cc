// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/context/tuner.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "ops/error.h"

namespace flownpu::gpu {
namespace {

// The number of runs whose median counts. One more run before them wakes the device and fills its
// caches.
constexpr std::size_t kRuns = 5;

bool is_wanted(const DeviceFacts& facts) {
  const char* given = std::getenv(kTuneVariable);
  if (given == nullptr) return !facts.is_software();
  const std::string text = given;
  if (text != "0" && text != "1")
    fail("[FlowNPU] device 'gpu': expected ", kTuneVariable, " to be 0 or 1, got '", text, "'");
  return text == "1";
}

}  // namespace

Tuner::Tuner(Context& context) : context_(context), measures_(is_wanted(context.facts())) {}

std::size_t Tuner::fastest(const std::string& what, std::size_t ways,
                           const std::function<void(std::size_t)>& launch) {
  if (!measures_ || ways < 2) return 0;
  const std::string key =
      context_.identity() + "the fastest of " + std::to_string(ways) + ":\n" + what;
  if (const auto found = known_.find(key); found != known_.end()) return found->second;
  if (const auto kept = context_.cache().find(key); kept && kept->size() == 1 && (*kept)[0] < ways)
    return known_[key] = (*kept)[0];
  std::vector<double> seconds;
  seconds.reserve(ways);
  for (std::size_t way = 0; way < ways; ++way) seconds.push_back(seconds_of([&] { launch(way); }));
  const auto best = static_cast<std::size_t>(std::ranges::min_element(seconds) - seconds.begin());
  context_.cache().keep(key, {static_cast<unsigned char>(best)});
  return known_[key] = best;
}

double Tuner::seconds_of(const std::function<void()>& launch) {
  const bool took = context_.takes_times();
  if (took) context_.take_times();
  context_.set_takes_times(true);
  for (std::size_t run = 0; run <= kRuns; ++run) launch();
  std::vector<KernelTime> times = context_.take_times();
  context_.set_takes_times(took);
  times.erase(times.begin());
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::ranges::nth_element(times, middle, {}, &KernelTime::seconds);
  return middle->seconds;
}

}  // namespace flownpu::gpu
