// SPDX-License-Identifier: Apache-2.0
// Only XDNA and XDNA2 are modelled.
#undef __AIE_ARCH__
#define __AIE_ARCH__ 22
#include <aie_api/aie.hpp>
