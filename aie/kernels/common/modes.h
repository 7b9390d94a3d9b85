// SPDX-License-Identifier: Apache-2.0
// The control registers that decide what conversions and shifts of vectors do.
#pragma once

#include <aie_api/aie.hpp>

namespace flownpu {

// Every kernel that converts or shifts vectors begins with it. A core powers up rounding towards
// minus infinity, which is a bias. Saturation must be off: `upshift` converts its result from
// accumulators, and would clamp where float_math.h shifts high bits out; the compiler's own code in
// a core's body may leave it on.
inline void set_conversion_modes() {
  aie::set_rounding(aie::rounding_mode::conv_even);
  aie::set_saturation(aie::saturation_mode::none);
}

}  // namespace flownpu
