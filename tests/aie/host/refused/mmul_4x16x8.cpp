// SPDX-License-Identifier: Apache-2.0
// XDNA has it, XDNA2 does not.
#include <aie_api/aie.hpp>

aie::mmul<4, 16, 8, bfloat16, bfloat16> product;
