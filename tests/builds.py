# SPDX-License-Identifier: Apache-2.0
"""Which build runs which tests of `make test`, and in which order: the only place that says so."""

from enum import Flag

import pytest


class Build(Flag):
    """The released build, the one with the sanitizers, or both."""

    RELEASED = 1
    SANITIZED = 2
    BOTH = 3


RELEASED, SANITIZED, BOTH = Build.RELEASED, Build.SANITIZED, Build.BOTH

# The longest beginning of a test's name decides. The sanitizers find faults of memory and undefined behaviour in C++;
# the released build has the CPU kernels' released instructions, so it compares numbers. Tests of what C++ matches,
# refuses, reads and plans run under the sanitizers alone, and so do those of the NPU's kernels, which have equal bits
# in both builds (-ffp-contract=off). The rest of tests/aie tests plans, which are Python, or runs the same C++ many
# times. A file that is RELEASED in a room of BOTH runs hardly any C++ of this project.
BUILDS = {
    "": RELEASED,
    "graph_rewrites": SANITIZED,
    "tests/aie/emulator/test_deadlocks.py": SANITIZED,
    "tests/aie/emulator/test_runs.py": SANITIZED,
    "tests/aie/host": BOTH,
    "tests/aie/host/test_host.py::test_snippet_compiles_for_its_architecture": RELEASED,  # only calls the compiler
    "tests/aie/host/test_host.py::test_unsupported_code_does_not_compile": RELEASED,
    "tests/aie/iron/test_conformance.py": SANITIZED,
    "tests/aie/kernels/test_attention.py": SANITIZED,
    "tests/aie/kernels/test_decode_layer.py": SANITIZED,
    "tests/aie/kernels/test_equations.py": SANITIZED,
    "tests/ep": SANITIZED,
    "tests/npu": BOTH,
    "tests/npu/artifacts": SANITIZED,
    "tests/npu/driver": SANITIZED,
    "tests/npu/match": SANITIZED,
    "tests/npu/run": SANITIZED,
    "tests/npu/test_over_xrt.py": SANITIZED,
    "tests/npu/test_selftest.py": SANITIZED,
    "tests/npu/test_xclbin.py": RELEASED,  # XRT's own tool
    "tests/ops": BOTH,
    "tests/ops/cpu/attention/test_plan.py": SANITIZED,
    "tests/ops/cpu/attention/test_refusals.py": SANITIZED,
    "tests/ops/cpu/test_processor.py": SANITIZED,
    "tests/ops/cpu/test_refusals.py": SANITIZED,
    "tests/ops/cpu/test_thread_pool.py": SANITIZED,
    "tests/ops/functions/test_eager_refusals.py": SANITIZED,
    "tests/ops/functions/test_opencl_loader.py": RELEASED,
    "tests/ops/functions/test_q4nx_file.py": RELEASED,
    "tests/ops/gpu/test_language.py": SANITIZED,
    "tests/ops/gpu/vulkan/test_abi.py": RELEASED,
    "tests/ops/lowering": SANITIZED,
    "tests/ops/test_attention.py::test_attention_definition_equals_equation": RELEASED,
    "tests/ops/test_attention.py::test_attention_definition_of_one_token_equals_equation": RELEASED,
    "tests/ops/test_attention.py::test_attention_reference_equals_equation": RELEASED,
    "tests/ops/test_contracts.py": SANITIZED,
    "tests/ops/test_int8_cache.py": RELEASED,
    "tests/ops/test_machine_limits.py": SANITIZED,
    "tests/ops/test_moe_definition.py": RELEASED,
    "tests/ops/test_operator_definitions.py": RELEASED,
    "tests/ops/test_processors.py": SANITIZED,
}
# Wherever they are, tests marked slow repeat the same C++, and those marked opencl run other projects' compilers.
RELEASED_MARKS = {"slow", "opencl"}

# The folders whose files take longest, in the order in which they begin, so that with several processes no long file
# is left when the others are done.
FIRST = (
    "tests/npu/run",
    "tests/rewrites",
    "tests/imagine",
    "tests/end_to_end",
    "tests/cli",
    "tests/npu",
    "tests/aie",
    "tests/fuzz",
)
# Folders whose fixtures, models that third-party exporters write, take longer than their tests: one process makes those
# of a folder and runs all of its tests.
TOGETHER = ("tests/rewrites/", "tests/imagine/")


def build_of_name(name: str) -> Build:
    """The build of a test, file or folder, by its name below the project's folder."""
    return BUILDS[max((beginning for beginning in BUILDS if name.startswith(beginning)), key=len)]


def build_of(item: pytest.Item) -> Build:
    """The build of a test with its marks."""
    return RELEASED if any(item.get_closest_marker(mark) for mark in RELEASED_MARKS) else build_of_name(item.nodeid)


def has_none(name: str, build: Build) -> bool:
    """Whether no test of a file or folder runs in a build, so that it is not imported."""
    if build is RELEASED:
        return False  # marks decide, too
    below = (own for beginning, own in BUILDS.items() if beginning.startswith(name))
    return not any(build in own for own in (build_of_name(name), *below))


def place(item: pytest.Item) -> int:
    """The place of a test's folder in FIRST."""
    return next((place for place, room in enumerate(FIRST) if item.nodeid.startswith(f"{room}/")), len(FIRST))


def scope(name: str, scope_of_file: str) -> str:
    """The tests that one process runs with a test: its folder if that is one of TOGETHER, else those of its file."""
    return next((room for room in TOGETHER if name.startswith(room)), scope_of_file)
