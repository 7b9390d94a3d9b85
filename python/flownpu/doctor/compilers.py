# SPDX-License-Identifier: Apache-2.0
"""The check of `flownpu doctor` for the compilers of the NPU's programs."""

from collections.abc import Iterator

from flownpu.aie.artifacts.toolchain import ToolchainError, find_toolchain
from flownpu.doctor.checks import Check, Status


def diagnose_compilers() -> Iterator[Check]:
    """AMD's compilers if one is installed: their versions, or the remedy for missing or unfit ones.

    Without compilers there is no line, because programs may be built on another machine, and `flownpu build` names
    missing tools.
    """
    try:
        toolchain, missing = find_toolchain()
    except ToolchainError as error:
        yield Check("compilers", Status.BAD, str(error))
        return
    if toolchain is not None:
        yield Check("compilers", Status.GOOD, ", ".join(toolchain.versions.values()))
    elif {"aiecc", "Peano"} - {tool.name for tool in missing}:
        for tool in missing:
            yield Check("compilers", Status.BAD, f"{tool.name} was not found ({tool.searched})", tool.remedy)
