// SPDX-License-Identifier: Apache-2.0
// An instruction of XDNA2.
#include <aie_api/aie.hpp>

auto power(const aie::vector<float, 16>& x) { return aie::exp2<bfloat16>(x); }
