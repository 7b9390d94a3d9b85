// SPDX-License-Identifier: Apache-2.0
// Placement: what runs where and why, told once when a session is ready.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace flownpu {

struct Placement {
  // A node the device does not take.
  struct Left {
    std::string node;
    std::string op_type;
    std::string reason;
  };

  // All that were ours to take: without those of providers that the user listed before ours.
  std::size_t nodes = 0;
  std::size_t elsewhere = 0;
  std::size_t partitions = 0;
  std::vector<Left> left;
  // Our operators that the device does not take, and that ORT therefore replaced by their
  // definitions, whose nodes are counted above.
  std::vector<Left> inlined;
  // Why long prompts are computed at once, for each partition that does not compute them slice by
  // slice (ep/program/schedule.h).
  std::vector<std::string> whole_prompts;
  // Operators that the device is for, but that its host computes, and what it says of those it
  // computes itself (Lowered of ops/device.h).
  std::vector<Left> on_host;
  std::vector<std::string> lowered;
  // Multiply-adds for one token, of the nodes we run and of those left.
  std::int64_t our_multiply_adds = 0;
  std::int64_t left_multiply_adds = 0;
  // Device::description(), and why it is that device: "device=auto and this build drives no NPU".
  std::string device;
  std::string why;
};

// "FlowNPU: 212 of 212 nodes and 100.0 % of multiply-adds in 1 partition on cpu (avx512, 2 threads,
// int8 activations), because device=auto and this build drives no NPU"; what is left follows by
// operator: "; left to ONNX Runtime's CPU provider: Cos (2), Sin".
std::string summary(const Placement& placement);

// One line a node: "  Sin 'rope/Sin': no kernel". At most `lines`, then how many more there are.
std::string list(const std::vector<Placement::Left>& nodes, std::size_t lines);

// The same facts as a JSON object: {"nodes", "claimed", "elsewhere", "partitions", "multiply_adds",
// "claimed_multiply_adds", "device", "why", "summary", "whole_prompts": [reason],
// "lowered": [text], "on_host": [{"node", "op_type", "reason"}],
// "left": [{"node", "op_type", "reason"}], "inlined": [the same]}.
std::string to_json(const Placement& placement);

}  // namespace flownpu
