// SPDX-License-Identifier: Apache-2.0
// Placement: which nodes run where and why, reported once when a session is ready.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace flownpu {

struct Placement {
  // A node that the device does not take.
  struct Left {
    std::string node;
    std::string op_type;
    std::string reason;
  };

  // The number of nodes offered to this provider, and the number that providers listed before it
  // took.
  std::size_t nodes = 0;
  std::size_t elsewhere = 0;
  std::size_t partitions = 0;
  std::vector<Left> left;
  // FlowNPU's operators that the device does not take, so that ORT replaced them by their
  // definitions. `nodes` counts the nodes of these.
  std::vector<Left> inlined;
  // If, Loop and Scan: ONNX Runtime runs them, and asks for the nodes of their bodies, which are
  // counted here once, like those of the model's graph.
  std::vector<Left> control_flow;
  // For each partition that does not compute long prompts slice by slice (ep/partition/schedule.h):
  // the reason.
  std::vector<std::string> whole_prompts;
  // Operators that the device could compute but leaves to its host, and one text for each partition
  // about its own operators (Lowered in ops/device.h).
  std::vector<Left> on_host;
  std::vector<std::string> lowered;
  // Multiply-adds, for one token and one image where the graph leaves their number open: of the
  // nodes that this provider runs, and of those in `left`.
  std::int64_t our_multiply_adds = 0;
  std::int64_t left_multiply_adds = 0;
  // False if a product's size is not known before it runs; then no share of these is reported.
  bool multiply_adds_known = true;
  // Device::description(), and why that device was chosen: "device=auto and this build drives no
  // NPU".
  std::string device;
  std::string why;

  // Adds the placement of the body of an If, Loop or Scan; `times`: how often each run of this
  // graph runs it, which its multiply-adds are counted.
  void add_body(const Placement& body, std::int64_t times);
};

// "FlowNPU: 212 of 212 nodes and 100.0 % of multiply-adds in 1 partition on cpu (avx512, 2 threads,
// int8 activations), because device=auto and this build drives no NPU", followed by the nodes that
// the device does not run, by operator: "; left to ONNX Runtime's CPU provider: Cos (2), Sin".
std::string summary(const Placement& placement);

// One line for each node: " Sin 'rope/Sin': no kernel". At most `lines` of them, then a line with
// the number of the others.
std::string list(const std::vector<Placement::Left>& nodes, std::size_t lines);

// The same facts as a JSON object: {"nodes", "claimed", "elsewhere", "partitions", "multiply_adds",
// "claimed_multiply_adds", "device", "why", "summary", "whole_prompts": [reason],
// "lowered": [text], "on_host": [{"node", "op_type", "reason"}],
// "left": [{"node", "op_type", "reason"}], "inlined": [the same],
// "control_flow": [the same]}.
std::string to_json(const Placement& placement);

}  // namespace flownpu
