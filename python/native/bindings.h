// SPDX-License-Identifier: Apache-2.0
// The functions that bind the parts of flownpu._native, one for each source file.
#pragma once

#include <nanobind/nanobind.h>

namespace flownpu::native {

// Value and Node, of which graphs are made.
void bind_graph(nanobind::module_& module);
// quantise(): the search for codes, scales and minima.
void bind_quantise(nanobind::module_& module);
// Contract, Port and AttributeRule, and contracts(): what the CPU device takes of each operator.
void bind_contracts(nanobind::module_& module);
// Decoder and EncoderShape: descriptions of layers; describe_decoder(), describe_encoder(),
// describe_operators(): the NPU array's part of a graph; find_decoder().
void bind_describe(nanobind::module_& module);
// Device and PreparedNode: single operators on arrays.
void bind_operators(nanobind::module_& module);
// GpuDevice, and the OpenCL platforms and devices of this machine. Must be called after
// bind_operators(), which binds the base class Device.
void bind_gpu(nanobind::module_& module);
// Emulator: runs arrays that are given as words (aie/words/writer.py).
void bind_emulator(nanobind::module_& module);
// ProgramRunner: runs programs in a folder of artifacts (aie/programs/).
void bind_programs(nanobind::module_& module);
// choose_stages(): the cheapest devices of a conversation.
void bind_stage_prices(nanobind::module_& module);
// processors(), usable_processors(), processor_quota(), memory_limit(), instruction_sets() and
// others: the part of this machine that the process may use.
void bind_limits(nanobind::module_& module);

}  // namespace flownpu::native
