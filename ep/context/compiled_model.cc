// SPDX-License-Identifier: Apache-2.0
#include "ep/context/compiled_model.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <map>
#include <string_view>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "ep/context/file.h"
#include "ep/model/graph.h"
#include "ep/options.h"
#include "ops/error.h"
#include "ops/system/paths.h"

namespace flownpu {
namespace {

// The version of a compiled model's file and of the layouts of the packed constants in it.
constexpr std::string_view kFormat = "flownpu-context 4; ";

// The attribute of an EPContext node with the identity of the partition's file. ORT's schema of the
// operator allows no attribute of our own, so this one has an existing name.
constexpr const char* kIdentity = "notes";

// The path of the model that ORT writes: `ep.context_file_path`, or the model's name with "_ctx".
std::filesystem::path context_model(const ContextRequest& request, const std::string& model_path) {
  if (!request.model_path.empty()) return path_of(request.model_path);
  if (model_path.empty()) {
    fail(
        "[FlowNPU] ep.context_enable: expected the model in a file, or ep.context_file_path, since "
        "the compiled partitions are written beside the model");
  }
  std::filesystem::path path = path_of(model_path);
  return path.replace_filename(path.stem().concat("_ctx.onnx"));
}

class Attributes {
 public:
  explicit Attributes(const Api& api) : api_(api) {}
  ~Attributes() {
    for (OrtOpAttr* attribute : made_) api_.call(ort::ReleaseOpAttr, attribute);
  }
  Attributes(const Attributes&) = delete;
  Attributes& operator=(const Attributes&) = delete;

  void text(const char* name, const std::string& value) {
    add(name, value.data(), static_cast<int>(value.size()), ort::ORT_OP_ATTR_STRING);
  }
  void integer(const char* name, std::int64_t value) { add(name, &value, 1, ort::ORT_OP_ATTR_INT); }
  std::vector<OrtOpAttr*>& made() { return made_; }

 private:
  void add(const char* name, const void* data, int length, ort::OrtOpAttrType type) {
    made_.reserve(made_.size() + 1);
    OrtOpAttr* attribute = nullptr;
    api_.call(ort::CreateOpAttr, name, data, length, type, &attribute);
    made_.push_back(attribute);
  }

  const Api& api_;
  std::vector<OrtOpAttr*> made_;
};

// The path of the file of this name beside the compiled model. `folder`: the model's according to
// ORT. It is not the folder of the model's file if the model comes from memory, or if the session
// names a folder for external initializers. Throws Error if there is no such file.
std::string find_context_file(const std::filesystem::path& name, const ContextRequest& request,
                              const std::string& folder) {
  std::vector<std::filesystem::path> folders;
  // When a model is compiled (`enable`), the entry names the output, so there is nothing to read.
  if (!request.enable && !request.model_path.empty())
    folders.push_back(path_of(request.model_path).parent_path());
  folders.push_back(path_of(folder));
  std::string missing;
  for (const std::filesystem::path& beside : folders) {
    const std::string path = utf8_of(beside / name);
    std::error_code ignored;
    if (std::filesystem::exists(path_of(path), ignored)) return path;
    missing += (missing.empty() ? "'" : ", nor '") + path + "'";
  }
  fail("[FlowNPU] there is no ", missing, ", the compiled partition of the model; copy it there, ",
       "or name the compiled model with ep.context_file_path if it is in another folder");
}

// Throws Error if the device does not take a node of the file. Lowering assumes nodes that
// Device::unsupported has accepted.
void check_taken(const std::string& path, const std::vector<Node>& nodes, const Device& device) {
  std::unordered_map<std::string_view, const Node*> producers;
  for (const Node& node : nodes) {
    for (const Value& output : node.outputs) producers.emplace(output.name, &node);
  }
  const Producer producer = [&](std::string_view value) {
    const auto found = producers.find(value);
    return found == producers.end() ? nullptr : found->second;
  };
  for (const Node& node : nodes) {
    const std::string reason = device.unsupported(node, producer);
    if (reason.empty()) continue;
    fail("[FlowNPU] the compiled partition '", path, "': ", to_string(node), ": ", reason,
         "; compile the model again");
  }
}

}  // namespace

ContextRequest read_context_request(const Api& api, const OrtSessionOptions* options) {
  std::map<std::string, std::string> entries = read_session_entries(api, options, "ep.context_");
  ContextRequest request;
  request.enable = entries["enable"] == "1";
  request.model_path = entries["file_path"];
  if (request.enable && entries["embed_mode"] == "1") {
    fail(
        "[FlowNPU] ep.context_embed_mode = '1' is not supported; expected 0: the weights of a "
        "compiled partition are mapped out of a file of their own");
  }
  return request;
}

bool is_context(const Node& node) {
  return node.op_type == "EPContext" && node.domain == "com.microsoft" &&
         node.text("source", "") == kEpName;
}

std::string context_files(const std::vector<Node>& nodes) {
  std::string names;
  for (const Node& node : nodes) {
    if (is_context(node))
      names.append(names.empty() ? "'" : ", '").append(node.text("ep_cache_context", "")) += '\'';
  }
  return names;
}

std::vector<Node> expand_contexts(std::vector<Node> nodes, const ContextRequest& request,
                                  const Lowering& lowering, const Device& device) {
  std::vector<Node> expanded;
  for (Node& node : nodes) {
    if (!is_context(node)) {
      expanded.push_back(std::move(node));
      continue;
    }
    const std::filesystem::path name = path_of(node.text("ep_cache_context", ""));
    if (name.empty() || name.has_parent_path()) {
      fail("[FlowNPU] ", to_string(node), ": expected the name of a file beside the model, got '",
           utf8_of(name), "'; compile the model again");
    }
    const std::string path = find_context_file(name, request, lowering.model_folder);
    ContextFile file = read_context_file(path, node, node.text(kIdentity, ""));
    const std::string compatibility = device.compatibility(lowering);
    if (file.compatibility != compatibility) {
      fail("[FlowNPU] the compiled partition '", path, "' was made for '", file.compatibility,
           "', this session is for '", compatibility,
           "': compile it again (`flownpu compile`), or choose the device it was made for");
    }
    check_taken(path, file.nodes, device);
    std::ranges::move(file.nodes, std::back_inserter(expanded));
  }
  return expanded;
}

OrtNode* write_context(const Api& api, const ContextRequest& request, const std::string& model_path,
                       std::size_t partition, const OrtNode* fused,
                       const std::string& compatibility, const std::vector<Node>& nodes) {
  const char* fused_name = nullptr;
  api.call(ort::Node_GetName, fused, &fused_name);
  const std::filesystem::path model = context_model(request, model_path);
  const std::string name = utf8_of(model.stem()) + "." + std::to_string(partition) + ".flownpu";
  const std::string identity =
      write_context_file(utf8_of(model.parent_path() / path_of(name)), compatibility, nodes);

  Attributes attributes(api);
  attributes.integer("main_context", 1);
  attributes.integer("embed_mode", 0);
  attributes.text("ep_cache_context", name);
  attributes.text(kIdentity, identity);
  attributes.text("ep_sdk_version", context_compatibility(compatibility));
  attributes.text("partition_name", fused_name);
  attributes.text("source", kEpName);
  const std::vector<std::string> inputs = input_names(api, fused);
  const std::vector<std::string> outputs = output_names(api, fused);
  OrtNode* node = nullptr;
  api.call(ort::CreateNode, "EPContext", "com.microsoft", fused_name, c_strings(inputs).data(),
           inputs.size(), c_strings(outputs).data(), outputs.size(), attributes.made().data(),
           attributes.made().size(), &node);
  return node;
}

std::string context_compatibility(const std::string& device) {
  return std::string(kFormat) + device;
}

std::string_view device_of_context(std::string_view compatibility) {
  return compatibility.starts_with(kFormat) ? compatibility.substr(kFormat.size()) : "";
}

}  // namespace flownpu
