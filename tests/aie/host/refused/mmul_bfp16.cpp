// SPDX-License-Identifier: Apache-2.0
// XDNA2 has it, XDNA does not.
#include <aie_api/aie.hpp>

aie::mmul<8, 8, 8, bfloat16, bfp16ebs8> product;
