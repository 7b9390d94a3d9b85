// SPDX-License-Identifier: Apache-2.0
// Fields of XRT's packets (detail/ert.h). A packet's payload is aligned to 4 bytes, but some of its
// structures need 8, so their fields are copied instead of accessed by name.
#pragma once

#include <cstddef>
#include <cstring>

namespace xdna_driver {

template <typename Value>
Value read_at(const void* data, std::size_t offset) {
  Value value{};
  std::memcpy(&value, static_cast<const std::byte*>(data) + offset, sizeof(value));
  return value;
}

template <typename Value>
void write_at(void* data, std::size_t offset, const Value& value) {
  std::memcpy(static_cast<std::byte*>(data) + offset, &value, sizeof(value));
}

}  // namespace xdna_driver
