// SPDX-License-Identifier: Apache-2.0
// flownpu_testing.npu: the layers below the NPU's device, for Python.
#pragma once

#include <nanobind/nanobind.h>

// Artifacts, CallFamily, and runtimes with what they make.
void bind_npu_runtime(nanobind::module_& module);
// Lowering, the device, and its KV caches.
void bind_npu_decoder(nanobind::module_& module);
// The waiting of the plugin for XRT, with a clock that a test controls.
void bind_waiting(nanobind::module_& module);
// Steps that the host computes.
void bind_host_operators(nanobind::module_& module);
