// SPDX-License-Identifier: Apache-2.0
// The control registers for conversions and shifts of vectors.
#pragma once

#include <aie_api/aie.hpp>

namespace flownpu {

// Every kernel that converts or shifts vectors begins with this call. A core powers up rounding
// towards minus infinity, which is a bias. Saturation must be off, because `upshift` converts its
// result from accumulators, and would clamp when float_math.h shifts high bits out. The compiler's
// own code in a core's body may leave saturation on.
inline void set_conversion_modes() {
  aie::set_rounding(aie::rounding_mode::conv_even);
  aie::set_saturation(aie::saturation_mode::none);
}

}  // namespace flownpu
