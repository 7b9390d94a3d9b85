// SPDX-License-Identifier: Apache-2.0
// The subset of aie_api that FlowNPU's kernels use, for g++. It is found as <aie_api/aie.hpp> if
// aie/host/ is in the include path. On the array the same line finds AMD's headers.
#pragma once

#include "elementary.hpp"
#include "mmul.hpp"
