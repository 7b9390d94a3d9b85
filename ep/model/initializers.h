// SPDX-License-Identifier: Apache-2.0
// Where the bytes of a model's constants are.
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

// Copies a constant that ONNX Runtime has, so that the value owns its bytes.
void own(Value& value);

class Initializers {
 public:
  // `model`: the model's file, beside which its external data are; empty if there is none.
  Initializers(const Api& api, const std::string& model);

  // Points `value`, whose type and shape are read, at the initializer's bytes if it is one: in the
  // file of external data, mapped whole (the value then owns the mapping), or else where ONNX
  // Runtime has them, as long as its session lives; those that are not aligned to their elements
  // are copied. Returns what is wrong with them, or nothing.
  std::string read(const OrtValueInfo* info, Value& value);

 private:
  bool map(const OrtValueInfo* info, Value& value, std::string& from);
  std::shared_ptr<const MappedFile> file(const std::string& path);

  const Api& api_;
  std::optional<std::filesystem::path> folder_;
  // By path; null for what cannot be mapped.
  std::map<std::string, std::shared_ptr<const MappedFile>> files_;
};

}  // namespace flownpu
