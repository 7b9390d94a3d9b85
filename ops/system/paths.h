// SPDX-License-Identifier: Apache-2.0
// Names of files, which in this project are UTF-8 as in a model, as the system takes and gives
// them.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace flownpu {

// The path by which a file is opened. On Linux the same bytes; on Windows in UTF-16, and of 260
// characters or more in the form (\\?\) that the system takes at any length.
std::filesystem::path path_of(std::string_view utf8);

// The other direction.
std::string utf8_of(const std::filesystem::path& path);

}  // namespace flownpu
