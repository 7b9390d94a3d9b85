// SPDX-License-Identifier: Apache-2.0
// UTF-8: the encoding that ONNX prescribes for strings, and that Python expects of messages.
#pragma once

#include <string>
#include <string_view>

namespace flownpu {

bool is_utf8(std::string_view text);

// The text with each byte that is no part of a valid character replaced by "\xNN".
std::string as_utf8(std::string_view text);

}  // namespace flownpu
