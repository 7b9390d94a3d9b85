// SPDX-License-Identifier: Apache-2.0
// A product takes a block vector on the right with op_transpose only.
#include <aie_api/aie.hpp>

using Blocks = aie::block_vector<bfp16ebs8, 64>;
void product(aie::mmul<8, 8, 8, bfp16ebs8, bfp16ebs8>& sum, const Blocks& a, const Blocks& b) {
  sum.mac(a, b);
}
