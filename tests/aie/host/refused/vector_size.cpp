// SPDX-License-Identifier: Apache-2.0
// 12 elements are no register.
#include <aie_api/aie.hpp>

aie::vector<bfloat16, 12> v;
