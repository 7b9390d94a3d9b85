// SPDX-License-Identifier: Apache-2.0
// Profiling: every step of a program as an event of ORT's JSON profile (ORT 1.25 and later call for
// it).
#pragma once

#include <string>

#include "ep/api.h"
#include "ep/program/program.h"

namespace flownpu {

// A profiler that ORT owns, and releases through its Release slot. `device` is named in every
// event.
ort::OrtEpProfilerImpl* make_profiler(const Api& api, std::string device);

// The profiler that watches the ORT event now running on this thread; null if none does. ORT
// brackets the run of a compiled node with StartEvent and StopEvent on the thread that runs it:
// that is how events of concurrent runs, each with a profiler of its own, are told apart.
StepObserver* current_observer();

}  // namespace flownpu
