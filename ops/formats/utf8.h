// SPDX-License-Identifier: Apache-2.0
// UTF-8: what ONNX says its texts are, and what Python takes a message to be.
#pragma once

#include <string>
#include <string_view>

namespace flownpu {

bool is_utf8(std::string_view text);

// The text with each byte that belongs to no character written "\xNN".
std::string as_utf8(std::string_view text);

}  // namespace flownpu
