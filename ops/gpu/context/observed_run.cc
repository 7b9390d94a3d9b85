// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/context/observed_run.h"

#include <cmath>
#include <cstddef>
#include <vector>

#include "ops/error.h"

namespace flownpu::gpu {

ObservedRun::ObservedRun(Context& context, const std::string& where)
    : context_(context),
      where_(where.empty() ? "" : ", " + where),
      observer_(current_dispatch_observer()),
      took_times_(context.takes_times()),
      before_(context.counts()) {
  if (observer_ == nullptr) return;
  if (took_times_) context_.take_times();  // discards those of earlier runs
  context_.set_takes_times(true);
}

ObservedRun::~ObservedRun() {
  if (observer_ == nullptr) return;
  context_.set_takes_times(took_times_);
  try {
    report();
  } catch (const Error&) {
    observer_ = nullptr;  // The run itself ends with an error.
  }
}

// Bytes that were moved to the device count for the first kernel, bytes moved back for the last.
void ObservedRun::report() {
  const std::vector<KernelTime> times = context_.take_times();
  const Counts& after = context_.counts();
  for (std::size_t i = 0; i < times.size(); ++i) {
    const std::int64_t to_device = i == 0 ? after.bytes_to_device - before_.bytes_to_device : 0;
    const std::int64_t to_host =
        i + 1 == times.size() ? after.bytes_to_host - before_.bytes_to_host : 0;
    const std::int64_t end = times[i].begin_ns + std::llround(times[i].seconds * 1e9);
    observer_->dispatched({.array = kGpuArray,
                           .calls = times[i].kernel + where_,
                           .begin_ns = times[i].begin_ns,
                           .end_ns = end,
                           .bytes_to_device = static_cast<std::uint64_t>(to_device),
                           .bytes_to_host = static_cast<std::uint64_t>(to_host)});
  }
}

}  // namespace flownpu::gpu
