// SPDX-License-Identifier: Apache-2.0
// flownpu._native: what its files bind.
#pragma once

#include <nanobind/nanobind.h>

namespace flownpu::native {

// Value and Node, of which graphs are made.
void bind_graph(nanobind::module_& module);
// quantise(): the search for codes, scales and minima.
void bind_quantise(nanobind::module_& module);
// Contract, Port and AttributeRule, and contracts(): what the CPU device takes of each operator.
void bind_contracts(nanobind::module_& module);
// describe_decoder() and describe_encoder(): the sizes of what the array would compute of a graph.
void bind_describe(nanobind::module_& module);
// Device and PreparedNode: single operators on arrays.
void bind_operators(nanobind::module_& module);
// GpuDevice, and what of OpenCL there is on this machine. After Device.
void bind_gpu(nanobind::module_& module);
// Emulator, of arrays that are given as words (aie/words/writer.py).
void bind_emulator(nanobind::module_& module);
// ProgramRunner, of programs of a folder of artifacts (aie/programs/).
void bind_programs(nanobind::module_& module);
// usable_processors(), processor_quota(), memory_limit() and instruction_sets(): what of this
// machine the process may use.
void bind_limits(nanobind::module_& module);

}  // namespace flownpu::native
