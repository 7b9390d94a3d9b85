// SPDX-License-Identifier: Apache-2.0
#include "ep/compile/placement.h"

#include <algorithm>
#include <iomanip>
#include <map>
#include <sstream>
#include <string_view>

#include "ops/formats/utf8.h"

namespace flownpu {
namespace {

std::string json_string(std::string_view text) {
  std::ostringstream json;
  json << '"';
  for (const char character : as_utf8(text)) {
    if (character == '"' || character == '\\') {
      json << '\\' << character;
    } else if (static_cast<unsigned char>(character) < 0x20) {
      json << "\\u" << std::hex << std::setw(4) << std::setfill('0') << int{character};
    } else {
      json << character;
    }
  }
  json << '"';
  return json.str();
}

std::string json_list(const std::vector<Placement::Left>& nodes) {
  std::ostringstream json;
  std::string_view separator;
  json << '[';
  for (const Placement::Left& left : nodes) {
    json << separator << "{\"node\": " << json_string(left.node)
         << ", \"op_type\": " << json_string(left.op_type)
         << ", \"reason\": " << json_string(left.reason) << "}";
    separator = ", ";
  }
  json << ']';
  return json.str();
}

std::string json_list(const std::vector<std::string>& texts) {
  std::string json = "[";
  for (const std::string& text : texts) json += (json.size() > 1 ? ", " : "") + json_string(text);
  return json + "]";
}

// The nodes counted by operator: "<title>Cos (2), Sin"; empty if there are none.
std::string counted(std::string_view title, const std::vector<Placement::Left>& nodes) {
  std::map<std::string_view, int> counts;
  for (const Placement::Left& left : nodes) ++counts[left.op_type];
  std::ostringstream text;
  std::string_view separator = title;
  for (const auto& [op_type, count] : counts) {
    text << separator << op_type;
    if (count > 1) text << " (" << count << ")";
    separator = ", ";
  }
  return text.str();
}

template <typename Item>
void append(std::vector<Item>& to, const std::vector<Item>& items) {
  to.insert(to.end(), items.begin(), items.end());
}

}  // namespace

void Placement::add_body(const Placement& body, std::int64_t times) {
  nodes += body.nodes;
  elsewhere += body.elsewhere;
  partitions += body.partitions;
  append(left, body.left);
  append(control_flow, body.control_flow);
  append(whole_prompts, body.whole_prompts);
  append(on_host, body.on_host);
  append(lowered, body.lowered);
  our_multiply_adds += body.our_multiply_adds * times;
  left_multiply_adds += body.left_multiply_adds * times;
  multiply_adds_known = multiply_adds_known && body.multiply_adds_known;
}

std::string summary(const Placement& placement) {
  std::ostringstream line;
  line << "FlowNPU: " << placement.nodes - placement.left.size() << " of " << placement.nodes
       << " nodes";
  const std::int64_t total = placement.our_multiply_adds + placement.left_multiply_adds;
  if (total > 0 && placement.multiply_adds_known) {
    const double percent =
        100.0 * static_cast<double>(placement.our_multiply_adds) / static_cast<double>(total);
    line << " and " << std::fixed << std::setprecision(1) << percent << " % of multiply-adds";
  }
  line << " in " << placement.partitions
       << (placement.partitions == 1 ? " partition" : " partitions") << " on " << placement.device
       << ", because " << placement.why;
  for (const std::string& text : placement.lowered) line << "; " << text;
  if (placement.elsewhere > 0) {
    line << "; " << placement.elsewhere << " more nodes are with providers listed before it";
  }
  line << counted("; on the device's host: ", placement.on_host)
       << counted("; left to ONNX Runtime's CPU provider: ", placement.left)
       << counted("; replaced by their definitions: ", placement.inlined)
       << counted("; control flow around its nodes: ", placement.control_flow);
  return line.str();
}

std::string list(const std::vector<Placement::Left>& nodes, std::size_t lines) {
  std::ostringstream text;
  const std::size_t shown = std::min(lines, nodes.size());
  for (std::size_t i = 0; i < shown; ++i) {
    const Placement::Left& left = nodes[i];
    // A device's reason may name the node itself: "[Sin 'rope/Sin'] expected ...".
    const bool named = left.reason.find(left.node) != std::string::npos;
    text << (i == 0 ? "  " : "\n  ") << (named ? "" : left.node + ": ") << left.reason;
  }
  if (shown < nodes.size()) text << "\n  and " << nodes.size() - shown << " more";
  return text.str();
}

std::string to_json(const Placement& placement) {
  std::ostringstream json;
  json << "{\"nodes\": " << placement.nodes
       << ", \"claimed\": " << placement.nodes - placement.left.size()
       << ", \"elsewhere\": " << placement.elsewhere << ", \"partitions\": " << placement.partitions
       << ", \"multiply_adds\": " << placement.our_multiply_adds + placement.left_multiply_adds
       << ", \"claimed_multiply_adds\": " << placement.our_multiply_adds
       << ", \"device\": " << json_string(placement.device)
       << ", \"why\": " << json_string(placement.why)
       << ", \"summary\": " << json_string(summary(placement))
       << ", \"whole_prompts\": " << json_list(placement.whole_prompts)
       << ", \"lowered\": " << json_list(placement.lowered)
       << ", \"on_host\": " << json_list(placement.on_host)
       << ", \"left\": " << json_list(placement.left)
       << ", \"inlined\": " << json_list(placement.inlined)
       << ", \"control_flow\": " << json_list(placement.control_flow) << "}\n";
  return json.str();
}

}  // namespace flownpu
