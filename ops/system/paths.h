// SPDX-License-Identifier: Apache-2.0
// Converts file names between UTF-8, which this project uses as models do, and the system's form.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace flownpu {

// The path with which a file is opened: on Linux the same bytes; on Windows UTF-16, and for 260
// characters or more in the form (\\?\) that allows any length.
std::filesystem::path path_of(std::string_view utf8);

// The reverse conversion.
std::string utf8_of(const std::filesystem::path& path);

}  // namespace flownpu
