// SPDX-License-Identifier: Apache-2.0
#include "ops/layers/checked_node.h"

#include <algorithm>

#include "ops/error.h"

namespace flownpu::layers {

std::int64_t size_attribute(const Node& node, std::string_view attribute, std::int64_t most) {
  const std::int64_t size = node.required_integer(attribute);
  if (size < 1 || size > most)
    fail("[", to_string(node), "] expected ", attribute, " of 1 to ", most, ", got ", size);
  return size;
}

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

}  // namespace flownpu::layers
