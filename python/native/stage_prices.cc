// SPDX-License-Identifier: Apache-2.0
// Binds the choice of devices by price.
#include "ops/stage_prices.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>

#include "python/native/bindings.h"

namespace nb = nanobind;

namespace flownpu::native {

void bind_stage_prices(nb::module_& module) {
  module.def(
      "choose_stages",
      [](const std::string& prices) {
        StageChoice choice = choose_stages(parse_prices(prices).front());
        return std::tuple(choice.device, choice.threshold, choice.costs);
      },
      nb::arg("prices"),
      "The cheapest device, or pair of devices, by the first table of a value of the provider's "
      "option `prices`; the pair's threshold; and the costs of all, the cheapest first.");
}

}  // namespace flownpu::native
