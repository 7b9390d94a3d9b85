// SPDX-License-Identifier: Apache-2.0
#include "ops/system/forks.h"

namespace flownpu {

std::string forked_text(std::string_view device) {
  return "[FlowNPU] device '" + std::string(device) +
         "' was opened before this process was forked, and its driver does not work in both: make "
         "sessions on it after the fork only, or start processes without it (multiprocessing's "
         "'spawn' or 'forkserver')";
}

}  // namespace flownpu
