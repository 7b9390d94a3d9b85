// SPDX-License-Identifier: Apache-2.0
// Finds the bytes of a model's constants.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "ep/api.h"
#include "ep/model/mapped_file.h"
#include "ops/nodes/node.h"

namespace flownpu {

// Copies a constant that ONNX Runtime owns, so that the value owns its bytes.
void own(Value& value);

class Initializers {
 public:
  // `model`: the path of the model's file, whose folder holds its external data; empty if there is
  // no file.
  Initializers(const Api& api, const std::string& model);

  // Points `value`, whose type and shape must be set, to its bytes if it is a constant initializer.
  // The bytes are in the file of external data, which is mapped whole (the value then shares
  // ownership of the mapping), or in ONNX Runtime's memory, which is valid as long as its session.
  // Bytes that are not aligned to their elements are copied. Returns an error message, or an empty
  // text.
  std::string read(const OrtValueInfo* info, Value& value);

 private:
  bool map(const OrtValueInfo* info, Value& value, std::string& from);
  std::shared_ptr<const MappedFile> file(const std::string& path);

  const Api& api_;
  std::optional<std::filesystem::path> folder_;
  // Mappings by path; null for a file that cannot be mapped.
  std::map<std::string, std::shared_ptr<const MappedFile>> files_;
};

}  // namespace flownpu
