// SPDX-License-Identifier: Apache-2.0
#include "ops/system/paths.h"

namespace flownpu {

std::filesystem::path path_of(std::string_view utf8) { return utf8; }

std::string utf8_of(const std::filesystem::path& path) { return path.string(); }

}  // namespace flownpu
