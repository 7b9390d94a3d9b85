// SPDX-License-Identifier: Apache-2.0
// Options: a user's choices for a session. They are the entries `ep.flownpuexecutionprovider.<key>`
// of the session's options, where ORT puts the provider options given to add_provider_for_devices
// or in genai_config.json.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ep/api.h"
#include "ops/choices.h"
#include "ops/device.h"
#include "ops/stage_prices.h"

namespace flownpu {

// `device`. kAuto: the cheapest by `prices`; without these the NPU if the session was given one
// that this build drives, else the CPU.
enum class DeviceChoice : std::uint8_t { kAuto, kCpu, kNpu, kEmulate, kGpu };
inline constexpr std::array<Choice<DeviceChoice>, 5> kDeviceChoices{
    {{"auto", DeviceChoice::kAuto},
     {"cpu", DeviceChoice::kCpu},
     {"npu", DeviceChoice::kNpu},
     {"emulate", DeviceChoice::kEmulate},
     {"gpu", DeviceChoice::kGpu}}};

// `prefer`: which of `prices` choose the device.
enum class Prefer : std::uint8_t { kSpeed, kEnergy };

// `on_unsupported`: the treatment of nodes that the device does not take. kError, the default,
// fails the session with the list of nodes and reasons, so that a model never runs elsewhere
// unnoticed; kWarn logs that list as a warning and kCpu as information, and both leave the nodes to
// ORT's CPU provider.
enum class OnUnsupported : std::uint8_t { kError, kWarn, kCpu };

// `claim`, where nodes may be left to ORT and the device is the CPU: kWorthwhile, the default,
// leaves more to it where taking them would make the model slower (ep/compile/worth.h); kAll takes
// all that the device can.
enum class Claim : std::uint8_t { kWorthwhile, kAll };

struct Options {
  DeviceChoice device = DeviceChoice::kAuto;
  // The second of two devices, "npu+cpu", which computes runs of few new tokens.
  std::optional<DeviceChoice> token_device;
  // `prompt_threshold`: with two devices, from how many new tokens in a sequence on a run is the
  // first one's.
  std::int64_t prompt_threshold = 16;
  Prefer prefer = Prefer::kSpeed;
  std::vector<PriceTable> prices;
  OnUnsupported on_unsupported = OnUnsupported::kError;
  Claim claim = Claim::kWorthwhile;
  // `activations`, `threads`, `cpu_isa`, `artifacts`, `npu_threshold`, `opencl_device`,
  // `gpu_api`, `gpu_dtype`, `gpu_weights`, `gpu_matrices`, `gpu_winograd`.
  DeviceOptions device_options;
  // `placement`: the destination of the placement report (placement.h) besides ORT's log. It is
  // empty for none, "stderr", the path of a file, or that of a folder with a '/' at its end. In a
  // folder each session writes a file named after its model (vision.json for vision.onnx;
  // model.json for a model from memory).
  std::string placement;

  // `name`: "gpu" or "npu+gpu". Throws Error for any other.
  void set_device(const std::string& name);
};

// `entries`: keys without the prefix, and values. Throws Error for an unknown key or an invalid
// value; the message lists the valid ones.
Options parse_options(const std::map<std::string, std::string>& entries);

// The session's entries whose keys begin with `prefix`, which is removed; and the entries with this
// provider's prefix.
std::map<std::string, std::string> read_session_entries(const Api& api,
                                                        const OrtSessionOptions* options,
                                                        std::string_view prefix);
std::map<std::string, std::string> read_entries(const Api& api, const OrtSessionOptions* options);

}  // namespace flownpu
