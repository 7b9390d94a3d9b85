# SPDX-License-Identifier: Apache-2.0
"""Exports of ORT GenAI's builder and of optimum, made once for all tests."""

from pathlib import Path

import pytest

from flownpu.convert import convert
from flownpu.errors import FlowNPUError
from tests.rewrites import optimum_export
from tests.rewrites.genai_export import OTHER_CONFIGS, Export, export, make_checkpoint, round_scales
from tests.rewrites.optimum_reference import write_reference

TOPICS = Path(__file__).parent.parent / "fixtures" / "gemma3-topics"

# One of each family, in the forms that exports come in. accuracy_level=0 keeps activations in float32: the builder's
# default for the CPU rounds them to int8, which would hide everything that is to be compared here.
WITH_ZERO_POINTS = "is_symmetric=false"
OPTIONS = {
    "gemma3": ("accuracy_level=0",),
    "gemma2": ("accuracy_level=0",),
    "llama": ("accuracy_level=0", "block_size=64", WITH_ZERO_POINTS),
    "qwen3": ("accuracy_level=0", "disable_qkv_fusion=true"),
    # The builder's recipes; the later ones have 8 bits, of the LM head and the table that it is, and of chosen layers.
    # It fails at a table in QDQ, and writes a damaged model if an 8-bit head is the table by the default algorithm.
    **{
        f"qwen3 in {recipe}": ("accuracy_level=0", f"algo_config={recipe}")
        for recipe in ("rtn", "k_quant", "k_quant_last", "rtn_last", "k_quant_mixed")
    },
    "llama in 8-bit head": ("accuracy_level=0", "matmul_mixed_precision=last_matmul:int8"),
    "llama in QDQ": ("accuracy_level=0", "use_qdq=true"),
    "topics": ("accuracy_level=0",),
    "topics in blocks of 16": ("accuracy_level=0", "block_size=16"),
    **dict.fromkeys(OTHER_CONFIGS, ("accuracy_level=0",)),
}


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """GenAI model folders by name: tiny random ones, and the small trained Gemma3 ("topics")."""
    folder = tmp_path_factory.mktemp("exports")
    runs = []
    for name, options in OPTIONS.items():
        family = name.split(" in ")[0]
        checkpoint = TOPICS if family == "topics" else make_checkpoint(family, folder / f"{name}-checkpoint")
        runs.append(Export(str(checkpoint), str(folder / name), options))
    export(*runs)
    for name, options in OPTIONS.items():
        if WITH_ZERO_POINTS in options or any(option.startswith("algo_config") for option in options):
            round_scales(folder / name)
    return {name: folder / name for name in OPTIONS}


@pytest.fixture(scope="session")
def optimum_python() -> Path:
    """The interpreter of optimum's environment; tests that need it are skipped where it cannot be installed."""
    try:
        return optimum_export.environment()
    except FlowNPUError as error:
        pytest.skip(f"optimum's environment cannot be made: {error}")


@pytest.fixture(scope="session")
def optimum_exports(optimum_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """optimum's exports of tiny random models, by name."""
    folder, names = tmp_path_factory.mktemp("optimum"), [*optimum_export.TASKS, optimum_export.WIDE]
    optimum_export.call(optimum_python, "export", output=folder, names=names)
    return {name: folder / name for name in names}


@pytest.fixture(scope="session")
def folded(optimum_exports: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """optimum's exports, converted, by name."""
    folder = tmp_path_factory.mktemp("folded")
    for name, source in optimum_exports.items():
        convert(source, folder / name)
    return {name: folder / name for name in optimum_exports}


@pytest.fixture(scope="session")
def references(optimum_exports: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """optimum's exports as they are, but with weights that went through Q4NX."""
    folder = tmp_path_factory.mktemp("references")
    return {name: write_reference(source, folder / name) for name, source in optimum_exports.items()}
