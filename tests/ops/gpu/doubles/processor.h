// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace opencl_double {

// PoCL 3.0 names a processor that is newer than its LLVM "generic", which LLVM has not among those
// of x86-64, and then compiles nothing. Here it gets the name of an older processor. To be called
// before PoCL looks for its devices.
void name_unknown_processor();

}  // namespace opencl_double
