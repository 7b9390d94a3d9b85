// SPDX-License-Identifier: Apache-2.0
// flownpu_testing: what bindings.cc leaves to other files of this folder.
#pragma once

#include <nanobind/nanobind.h>

// ThreadPool, which tells who did what.
// Contract, Port and AttributeRule, and contracts(): what the CPU device takes of each operator.
void bind_contracts(nanobind::module_& module);

void bind_thread_pool(nanobind::module_& module);
