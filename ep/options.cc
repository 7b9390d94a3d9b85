// SPDX-License-Identifier: Apache-2.0
#include "ep/options.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <memory>
#include <string_view>
#include <utility>

#include "ops/error.h"

namespace flownpu {
namespace {

// ORT prefixes a provider's options with "ep.", its name in lower case, and ".".
constexpr std::string_view kPrefix = "ep.flownpuexecutionprovider.";

// The upper bound only keeps a typing error from starting thousands of threads.
int parse_threads(const std::string& value) {
  constexpr int kMaxThreads = 1024;
  int threads = -1;
  const char* end = value.data() + value.size();
  const auto [stop, code] = std::from_chars(value.data(), end, threads);
  if (code != std::errc() || stop != end || threads < 0 || threads > kMaxThreads) {
    fail("[FlowNPU] option threads = '", value,
         "' is not valid; expected an integer from 0 (one for each core) to ", kMaxThreads);
  }
  return threads;
}

// `key`: "npu_threshold"; `what`: "a number of multiply-adds"; `least`: the smallest valid number.
std::int64_t parse_threshold(std::string_view key, std::string_view what, std::int64_t least,
                             const std::string& value) {
  std::int64_t threshold = -1;
  const char* end = value.data() + value.size();
  const auto [stop, code] = std::from_chars(value.data(), end, threshold);
  if (code != std::errc() || stop != end || threshold < least) {
    fail("[FlowNPU] option ", key, " = '", value, "' is not valid; expected ", what, ", ", least,
         " or more (64 bits)");
  }
  return threshold;
}

std::string parse_placement(const std::string& value) {
  if (value.empty() || value == "log") return "";
  if (value == "stderr" || value.find('/') != std::string::npos) return value;
  fail("[FlowNPU] option placement = '", value,
       "' is not known; expected one of: log, stderr, the path of a file to write (with a '/')");
}

using Parser = void (*)(Options& options, const std::string& value);

constexpr std::array<std::pair<std::string_view, Parser>, 18> kParsers{{
    {"device", [](Options& options, const std::string& value) { options.set_device(value); }},
    {"prompt_threshold",
     [](Options& options, const std::string& value) {
       options.prompt_threshold =
           parse_threshold("prompt_threshold", "a number of new tokens", 2, value);
     }},
    {"prefer",
     [](Options& options, const std::string& value) {
       options.prefer = choose<Prefer, 2>(
           "prefer", value, {{{"speed", Prefer::kSpeed}, {"energy", Prefer::kEnergy}}});
     }},
    {"prices",
     [](Options& options, const std::string& value) { options.prices = parse_prices(value); }},
    {"on_unsupported",
     [](Options& options, const std::string& value) {
       options.on_unsupported = choose<OnUnsupported, 3>("on_unsupported", value,
                                                         {{{"error", OnUnsupported::kError},
                                                           {"warn", OnUnsupported::kWarn},
                                                           {"cpu", OnUnsupported::kCpu}}});
     }},
    {"claim",
     [](Options& options, const std::string& value) {
       options.claim = choose<Claim, 2>(
           "claim", value, {{{"worthwhile", Claim::kWorthwhile}, {"all", Claim::kAll}}});
     }},
    {"activations",
     [](Options& options, const std::string& value) {
       options.device_options.activations = choose("activations", value, kActivationsChoices);
     }},
    {"threads",
     [](Options& options, const std::string& value) {
       options.device_options.threads = parse_threads(value);
     }},
    {"cpu_isa",  // The device checks it, and lists the valid ones.
     [](Options& options, const std::string& value) { options.device_options.cpu_isa = value; }},
    {"artifacts",
     [](Options& options, const std::string& value) { options.device_options.artifacts = value; }},
    {"npu_threshold",
     [](Options& options, const std::string& value) {
       options.device_options.npu_threshold =
           parse_threshold("npu_threshold", "a number of multiply-adds", 0, value);
     }},
    {"opencl_device",  // Any part of a name; the device checks it.
     [](Options& options, const std::string& value) {
       options.device_options.opencl_device = value;
     }},
    {"gpu_api",
     [](Options& options, const std::string& value) {
       options.device_options.gpu_api = choose("gpu_api", value, kGpuApiChoices);
     }},
    {"gpu_dtype",
     [](Options& options, const std::string& value) {
       options.device_options.gpu_dtype = choose("gpu_dtype", value, kGpuDtypeChoices);
     }},
    {"gpu_weights",
     [](Options& options, const std::string& value) {
       options.device_options.gpu_weights = choose("gpu_weights", value, kGpuWeightsChoices);
     }},
    {"gpu_matrices",
     [](Options& options, const std::string& value) {
       options.device_options.gpu_matrices = choose("gpu_matrices", value, kGpuMatricesChoices);
     }},
    {"gpu_winograd",
     [](Options& options, const std::string& value) {
       options.device_options.gpu_winograd = choose("gpu_winograd", value, kGpuWinogradChoices);
     }},
    {"placement", [](Options& options,
                     const std::string& value) { options.placement = parse_placement(value); }},
}};

}  // namespace

void Options::set_device(const std::string& name) {
  const std::size_t plus = name.find('+');
  device = choose("device", name.substr(0, plus), kDeviceChoices);
  token_device.reset();
  if (plus == std::string::npos) return;
  const DeviceChoice second = choose("device", name.substr(plus + 1), kDeviceChoices);
  const auto is_array = [](DeviceChoice choice) {
    return choice == DeviceChoice::kNpu || choice == DeviceChoice::kEmulate;
  };
  if (device == DeviceChoice::kAuto || second == DeviceChoice::kAuto || device == second ||
      (is_array(device) && is_array(second))) {
    fail("[FlowNPU] option device = '", name,
         "' is not valid; expected two different ones of cpu, gpu and npu (or emulate): npu+gpu ",
         "computes prompts on the NPU and tokens on the GPU");
  }
  token_device = second;
}

Options parse_options(const std::map<std::string, std::string>& entries) {
  Options options;
  for (const auto& [key, value] : entries) {
    const auto* parser = std::ranges::find_if(
        kParsers, [&key = key](const auto& entry) { return entry.first == key; });
    if (parser == kParsers.end()) {
      std::string valid;
      for (const auto& [name, unused] : kParsers)
        valid += (valid.empty() ? "" : ", ") + std::string(name);
      fail("[FlowNPU] option ", key, " = '", value, "' is not known; the options are: ", valid);
    }
    parser->second(options, value);
  }
  return options;
}

std::map<std::string, std::string> read_session_entries(const Api& api,
                                                        const OrtSessionOptions* options,
                                                        std::string_view prefix) {
  OrtKeyValuePairs* pairs = nullptr;
  api.call(ort::GetSessionOptionsConfigEntries, options, &pairs);
  const auto release = [&api](OrtKeyValuePairs* owned) {
    api.call(ort::ReleaseKeyValuePairs, owned);
  };
  const std::unique_ptr<OrtKeyValuePairs, decltype(release)> owner(pairs, release);
  const char* const* keys = nullptr;
  const char* const* values = nullptr;
  std::size_t count = 0;
  api.call(ort::GetKeyValuePairs, pairs, &keys, &values, &count);
  std::map<std::string, std::string> entries;
  for (std::size_t i = 0; i < count; ++i) {
    const std::string_view key = keys[i];
    if (key.starts_with(prefix)) entries.emplace(key.substr(prefix.size()), values[i]);
  }
  return entries;
}

std::map<std::string, std::string> read_entries(const Api& api, const OrtSessionOptions* options) {
  return read_session_entries(api, options, kPrefix);
}

}  // namespace flownpu
