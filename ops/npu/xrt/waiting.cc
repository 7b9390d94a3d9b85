// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/xrt/waiting.h"

#include <filesystem>
#include <fstream>

namespace flownpu::npu::xrt_abi {
namespace {

using std::chrono::milliseconds;

// The module's parameter: ms without progress after which a command is ended; 0: never. Only root
// may read it.
constexpr const char* kParameter = "/sys/module/amdxdna/parameters/tdr_timeout_ms";
constexpr milliseconds kDefault{2000};
// Drivers without the parameter take 6 s, 16 s or a minute. What takes longer than this is not
// waited for but kept, and freed when it is found to have ended.
constexpr milliseconds kUnknown{15000};
// Starting the context anew.
constexpr milliseconds kRecovery{1000};

}  // namespace

milliseconds watchdog_patience() {
  std::error_code ignored;
  if (!std::filesystem::exists(kParameter, ignored)) return kUnknown;
  milliseconds limit = kDefault;
  if (milliseconds::rep read = 0; std::ifstream(kParameter) >> read) limit = milliseconds(read);
  if (limit.count() == 0) return limit;
  // A driver that looks at intervals finds a command that began within one at the end of the next.
  return 2 * limit + kRecovery;
}

}  // namespace flownpu::npu::xrt_abi
