// SPDX-License-Identifier: Apache-2.0
// flownpu_testing: the parts of bindings.cc that are in other files of this folder.
#pragma once

#include <nanobind/nanobind.h>

// ThreadPool, which reports the thread of each task.
void bind_thread_pool(nanobind::module_& module);

// tile_dots() and attend_by_tiles(): attention by a matrix unit that is emulated.
void bind_tile_rows(nanobind::module_& module);

// interleave(), interleave_file() and ask_for_large_pages(), of arrays.
void bind_pages(nanobind::module_& module);

// flownpu_testing.gpu: the kernel language, and kernels on an OpenCL device.
void bind_gpu(nanobind::module_& module);
// The device of a session; bound after the NPU's nodes and steps.
void bind_gpu_session(nanobind::module_& module);
