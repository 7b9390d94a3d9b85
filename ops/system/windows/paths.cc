// SPDX-License-Identifier: Apache-2.0
#include "ops/system/paths.h"

#include <windows.h>

#include <system_error>

namespace flownpu {
namespace {

constexpr std::wstring_view kAnyLength = LR"(\\?\)";
constexpr std::wstring_view kShare = LR"(\\)";

}  // namespace

std::filesystem::path path_of(std::string_view utf8) {
  const std::filesystem::path path(std::u8string(utf8.begin(), utf8.end()));
  if (path.native().size() < MAX_PATH || path.native().starts_with(kAnyLength)) return path;
  std::error_code ignored;  // on failure the path is used as it is
  const std::filesystem::path absolute = std::filesystem::absolute(path, ignored);
  std::wstring name = absolute.lexically_normal().make_preferred().native();
  if (name.empty()) return path;
  if (name.starts_with(kShare)) name.replace(0, kShare.size(), LR"(UNC\)");
  return std::wstring(kAnyLength).append(name);
}

std::string utf8_of(const std::filesystem::path& path) {
  const std::u8string text = path.u8string();
  return {text.begin(), text.end()};
}

}  // namespace flownpu
