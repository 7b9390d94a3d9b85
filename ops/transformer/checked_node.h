// SPDX-License-Identifier: Apache-2.0
// Checks of a node that a device made for itself, which may have been read back from a file.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "ops/nodes/node.h"

namespace flownpu::transformer {

// Throws Error unless the node's inputs (or outputs) are as many as `types`, all present, and each
// of one of the types listed for it. `what`: "input" or "output".
void check_values(const Node& node, const char* what, const std::vector<Value>& values,
                  const std::vector<std::vector<DataType>>& types);

}  // namespace flownpu::transformer
