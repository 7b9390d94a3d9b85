// SPDX-License-Identifier: Apache-2.0
#include "ep/compile/device_choice.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <string_view>
#include <utility>

#include "ops/choices.h"
#include "ops/npu/device.h"
#include "ops/transformer/staged_device.h"

namespace flownpu {
namespace {

// Null for kAuto.
std::unique_ptr<Device> make_device(DeviceChoice choice, const DeviceOptions& options) {
  switch (choice) {
    case DeviceChoice::kCpu:
      return make_cpu_device(options);
    case DeviceChoice::kNpu:
      return make_npu_device(options);
    case DeviceChoice::kEmulate:
      return make_emulate_device(options);
    case DeviceChoice::kGpu:
      return make_gpu_device(options);
    case DeviceChoice::kAuto:
      break;
  }
  return nullptr;
}

std::shared_ptr<const Device> make_named(const Options& options) {
  std::unique_ptr<Device> prompts = make_device(options.device, options.device_options);
  if (!options.token_device) return prompts;
  std::unique_ptr<Device> tokens = make_device(*options.token_device, options.device_options);
  // The device that keeps KV caches in its own memory hands over.
  const bool own_prompts = options.device != DeviceChoice::kCpu;
  if (!own_prompts) std::swap(prompts, tokens);
  return std::make_shared<transformer::StagedDevice>(std::move(prompts), std::move(tokens),
                                                     own_prompts, options.prompt_threshold);
}

// Why this session cannot use a device that has a price; empty if it can.
std::string why_absent(const std::string& name, const DeviceOptions& options, bool has_npu) {
  const DeviceChoice choice = choose("prices", name, kDeviceChoices);
  if (choice == DeviceChoice::kAuto) fail("[FlowNPU] option prices: expected a device, got auto");
  if (choice != DeviceChoice::kNpu) return make_device(choice, options)->absent();
  if (!npu_built_in()) return "this build drives none";
  return has_npu ? "" : "the session was given none";
}

// "gpu 44 tokens/s (cpu 20)", "npu 0.4 s (gpu 2)": the price of `chosen` and those of the others.
template <typename Price>
std::string compared(const PriceTable& table, std::string_view chosen, std::string_view unit,
                     const Price& price) {
  std::ostringstream first;
  std::ostringstream others;
  first.precision(3);
  others.precision(3);
  for (const StagePrices& device : table.devices) {
    if (device.device == chosen) {
      first << chosen << ' ' << price(device) << unit;
    } else {
      others << (others.view().empty() ? " (" : ", ") << device.device << ' ' << price(device);
    }
  }
  return first.str() + others.str() + (others.view().empty() ? "" : ")");
}

std::string reason_of(const PriceTable& table, const StageChoice& choice) {
  const bool in_seconds = table.unit == "seconds";
  const std::size_t plus = choice.device.find('+');
  const std::string prompts = choice.device.substr(0, plus);
  const std::string tokens = plus == std::string::npos ? prompts : choice.device.substr(plus + 1);
  std::string text = "device=auto by " + table.source + " " + table.unit + ": tokens: ";
  text += compared(table, tokens, in_seconds ? " tokens/s" : " J", [&](const StagePrices& device) {
    return in_seconds ? 1 / device.token : device.token;
  });
  text += "; prompts";
  if (choice.threshold) text += " of " + std::to_string(*choice.threshold) + " and more new tokens";
  text += ", one of " + std::to_string(table.prompt) + ": ";
  return text + compared(table, prompts, in_seconds ? " s" : " J", [&](const StagePrices& device) {
           return device.prompts.at(table.prompt);
         });
}

// The cheapest of the devices that have prices and are here. `options` get its name, and stay auto
// if there is none.
std::string choose_by_price(Options& options, bool has_npu) {
  const std::string_view unit = options.prefer == Prefer::kSpeed ? "seconds" : "joules";
  const auto found = std::ranges::find(options.prices, unit, &PriceTable::unit);
  if (found == options.prices.end()) {
    fail("[FlowNPU] option prefer: expected prices in ", unit, ", and the option prices has ",
         options.prices.empty() ? "none at all" : "none of these",
         "; `flownpu tune MODEL --prefer ", unit == "seconds" ? "speed" : "energy",
         " --write` measures them");
  }
  PriceTable table = *found;
  std::string absent;
  std::erase_if(table.devices, [&](const StagePrices& device) {
    const std::string reason = why_absent(device.device, options.device_options, has_npu);
    if (!reason.empty()) absent += "; without " + device.device + ": " + reason;
    return !reason.empty();
  });
  if (table.devices.empty()) return absent;
  const StageChoice choice = choose_stages(table);
  options.set_device(choice.device);
  if (choice.threshold) options.prompt_threshold = *choice.threshold;
  return reason_of(table, choice) + absent;
}

}  // namespace

ChosenDevice choose_device(const Options& given, bool has_npu) {
  Options options = given;
  std::string by_price;
  if (options.device == DeviceChoice::kAuto &&
      (!options.prices.empty() || options.prefer != Prefer::kSpeed)) {
    by_price = choose_by_price(options, has_npu);
  }
  if (options.device != DeviceChoice::kAuto) {
    std::shared_ptr<const Device> device = make_named(options);
    const std::string name = "device=" + std::string(device->name());
    return {std::move(device), by_price.empty() ? name : by_price};
  }
  if (has_npu) {
    return {make_npu_device(options.device_options),
            "device=auto and the session was given an NPU" + by_price};
  }
  return {make_cpu_device(options.device_options),
          (npu_built_in() ? "device=auto and the session was given no NPU"
                          : "device=auto and this build drives no NPU") +
              by_price};
}

}  // namespace flownpu
