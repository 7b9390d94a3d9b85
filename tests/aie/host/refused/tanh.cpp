// SPDX-License-Identifier: Apache-2.0
// An instruction of XDNA2.
#include <aie_api/aie.hpp>

auto tangent(const aie::vector<float, 16>& x) { return aie::tanh<bfloat16>(x); }
