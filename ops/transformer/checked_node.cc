// SPDX-License-Identifier: Apache-2.0
#include "ops/transformer/checked_node.h"

#include <algorithm>

#include "ops/error.h"

namespace flownpu::transformer {

void check_values(const Node& node, const char* what, const std::vector<Value>& values,
                  const std::vector<std::vector<DataType>>& types) {
  if (values.size() != types.size())
    fail("[", to_string(node), "] expected ", types.size(), " ", what, "s, got ", values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i].name.empty() || std::ranges::find(types[i], values[i].type) == types[i].end())
      fail("[", to_string(node), "] expected ", what, " ", i, " to be ", name_of(types[i].front()),
           ", got ", values[i].name.empty() ? "none" : name_of(values[i].type));
  }
}

}  // namespace flownpu::transformer
