// SPDX-License-Identifier: Apache-2.0
// 64 bits are no register.
#include <aie_api/aie.hpp>

aie::vector<bfloat16, 4> v;
