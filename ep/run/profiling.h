// SPDX-License-Identifier: Apache-2.0
// Profiling: adds every step of a partition as an event to ORT's JSON profile (ORT 1.25 and later).
#pragma once

#include <string>

#include "ep/api.h"
#include "ep/partition/execution_plan.h"

namespace flownpu {

// A new profiler, which ORT owns and releases through its Release slot. `device` is named in every
// event.
ort::OrtEpProfilerImpl* make_profiler(const Api& api, std::string device);

// The observer of the ORT event that is now running on this thread; null if it is not profiled. ORT
// calls StartEvent and StopEvent around the run of a compiled node, on its thread. So concurrent
// runs, each with its own profiler, keep their events apart.
StepObserver* current_observer();

}  // namespace flownpu
