// SPDX-License-Identifier: Apache-2.0
// What a device checks of a node that it made for itself, or that was kept in a file since.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "ops/nodes/node.h"

namespace flownpu::layers {

// A required attribute that is a size. Throws Error unless it is 1 to `most`.
std::int64_t size_attribute(const Node& node, std::string_view attribute, std::int64_t most);

// Throws Error unless the nodes's inputs (or outputs) are all there, as many as `types`, and each
// of one of its types. `what`: "input", "output".
void check_values(const Node& node, const char* what, const std::vector<Value>& values,
                  const std::vector<std::vector<DataType>>& types);

}  // namespace flownpu::layers
