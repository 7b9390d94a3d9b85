// SPDX-License-Identifier: Apache-2.0
// XDNA has no block floating point.
#include <aie_api/aie.hpp>

aie::block_vector<bfp16ebs8, 64> blocks;
