// SPDX-License-Identifier: Apache-2.0
#include "ops/system/variables.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <system_error>

#include "ops/error.h"

namespace flownpu {

std::chrono::milliseconds seconds_of(const char* variable, std::chrono::milliseconds otherwise) {
  const char* const given = std::getenv(variable);
  if (given == nullptr) return otherwise;
  const std::string text = given;
  double seconds = 0;
  const auto [stop, code] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  constexpr double kMost = 1e6;  // eleven days
  if (code != std::errc() || stop != text.data() + text.size() ||
      !(seconds > 0 && seconds <= kMost))
    fail("[FlowNPU] expected ", variable, " to be a number of seconds above 0, got '", text, "'");
  return std::chrono::milliseconds(std::max<std::int64_t>(std::llround(seconds * 1e3), 1));
}

}  // namespace flownpu
