// SPDX-License-Identifier: Apache-2.0
// op_transpose is for block vectors only.
#include <aie_api/aie.hpp>

auto transposed(const aie::vector<bfloat16, 64>& b) { return aie::op_transpose(b); }
