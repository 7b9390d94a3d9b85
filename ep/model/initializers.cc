// SPDX-License-Identifier: Apache-2.0
#include "ep/model/initializers.h"

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "ops/system/paths.h"

namespace flownpu {
namespace {

void copy(Value& value) {
  const std::size_t bytes = bytes_of(value.type, value.shape.value_or(Shape()));
  if (bytes == 0) return;
  auto copied = std::make_shared<std::vector<std::byte>>(bytes);
  std::memcpy(copied->data(), value.constant, bytes);
  value.constant = copied->data();
  value.owner = std::move(copied);
}

// Copies data whose address is not a multiple of the element size: files may have it at any offset,
// but steps need aligned elements.
void align(Value& value) {
  const auto place = reinterpret_cast<std::uintptr_t>(value.constant);
  if (!is_packed(value.type) && place % size_of(value.type) != 0) copy(value);
}

}  // namespace

void own(Value& value) {
  if (value.owner == nullptr) copy(value);
}

Initializers::Initializers(const Api& api, const std::string& model) : api_(api) {
  if (!model.empty()) folder_ = path_of(model).parent_path();
}

std::string Initializers::read(const OrtValueInfo* info, Value& value) {
  bool is_constant = false;
  api_.call(ort::ValueInfo_IsConstantInitializer, info, &is_constant);
  if (!is_constant) return "";
  std::string from;
  if (map(info, value, from)) {
    align(value);
    return "";
  }
  const OrtValue* initializer = nullptr;
  try {
    api_.call(ort::ValueInfo_GetInitializerValue, info, &initializer);
    if (initializer == nullptr) fail("no data");
    api_.call(ort::GetTensorData, initializer, &value.constant);
  } catch (const Error& error) {  // for instance missing external data
    return "initializer '" + value.name + "' cannot be read" + from + ": " + error.what();
  }

  ort::ONNXTensorElementDataType element = ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  const std::int64_t* dims = nullptr;
  std::size_t rank = 0;
  api_.call(ort::GetTensorElementTypeAndShapeDataReference, initializer, &element, &dims, &rank);
  value.shape = Shape(dims, rank);
  // An initializer without elements is a constant, too; the byte is never read.
  static constexpr std::byte kNoElements{};
  if (value.constant == nullptr) value.constant = &kNoElements;
  align(value);
  return "";
}

// Maps the tensor's external data. Returns false if there is none, or if the file does not fit the
// model; ORT's API then returns the data or an error. `from` is set to " from '<file>'" for the
// error's message.
bool Initializers::map(const OrtValueInfo* info, Value& value, std::string& from) {
  if (!folder_ || !value.shape) return false;
  OrtExternalInitializerInfo* found = nullptr;
  api_.call(ort::ValueInfo_GetExternalInitializerInfo, info, &found);
  if (found == nullptr) return false;
  const auto release = [this](OrtExternalInitializerInfo* data) {
    api_.call(ort::ReleaseExternalInitializerInfo, data);
  };
  const std::unique_ptr<OrtExternalInitializerInfo, decltype(release)> data(found, release);
  const std::filesystem::path location = api_.call(ort::ExternalInitializerInfo_GetFilePath, found);
  from = " from '" + utf8_of(location) + "'";
  const std::int64_t offset = api_.call(ort::ExternalInitializerInfo_GetFileOffset, found);
  const std::size_t bytes = api_.call(ort::ExternalInitializerInfo_GetByteSize, found);

  const std::shared_ptr<const MappedFile> mapped = file(utf8_of(*folder_ / location));
  if (mapped == nullptr || bytes != value.bytes() || offset < 0 || bytes > mapped->bytes().size() ||
      static_cast<std::size_t>(offset) > mapped->bytes().size() - bytes) {
    return false;
  }
  value.constant = mapped->bytes().data() + offset;
  value.owner = mapped;
  return true;
}

std::shared_ptr<const MappedFile> Initializers::file(const std::string& path) {
  const auto [known, is_new] = files_.try_emplace(path);
  if (!is_new) return known->second;
  try {
    known->second = MappedFile::shared(path);
    return known->second;
  } catch (const Error&) {
    return nullptr;  // map() then returns false
  }
}

}  // namespace flownpu
