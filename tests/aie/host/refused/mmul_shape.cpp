// SPDX-License-Identifier: Apache-2.0
// No architecture multiplies 4x4x4 in bf16.
#include <aie_api/aie.hpp>

aie::mmul<4, 4, 4, bfloat16, bfloat16> product;
