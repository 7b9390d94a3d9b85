# SPDX-License-Identifier: Apache-2.0
"""Matrix units, which the newest lavapipe has: processes with a C library of its own compute, this one compares."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flownpu import _native
from flownpu.selftest.gpu.attention import attention_of_matrices
from flownpu.selftest.gpu.case import PreparedCase
from flownpu.selftest.gpu.products import products_of_matrices
from tests import lavapipe as packages
from tests.ops.device import testing
from tests.ops.gpu.test_session import hidden_of

pytestmark = pytest.mark.opencl


@pytest.fixture(scope="module")
def newest(tmp_path_factory):
    """Runs Python's text beside the newest lavapipe; returns what it prints, from JSON, and where kernels are kept."""
    folder = tmp_path_factory.mktemp("newest")
    try:
        command, variables = packages.newest(folder)
    except packages.MissingError as missing:
        pytest.skip(str(missing))

    def run(text: str, *arguments: str):
        done = subprocess.run(
            [*command, sys.executable, "-c", text, *arguments],
            env=os.environ | variables, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    run.cache = Path(variables["FLOWNPU_GPU_CACHE"])
    return run


def validated(module: bytes, file: Path) -> subprocess.CompletedProcess:
    """Gives a module to the newest spirv-val."""
    file.write_bytes(module)
    command = [*packages.newest_spirv_val(), "--target-env", "vulkan1.3", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


_VARIANTS = """
import json
from flownpu.selftest.gpu.trials import Devices, run_variant, variants
devices = Devices({"gpu_api": "vulkan"})
of_matrices = [one for one in variants(large=False, images=False, matrices=True) if "matrices" in one.name]
results = [run_variant(one, devices) for one in of_matrices]
found = [(one.name, one.passed, one.text, list(one.kernels)) for one in results]
print(json.dumps([devices.first.facts.matrices, found]))
"""


def test_kernels_of_matrices_are_right(newest):
    """Against float64, within the bounds of roundings to float16; and their modules keep the format's rules."""
    matrices, results = newest(_VARIANTS)
    assert matrices == "8 x 8 x 8 in 8 lanes"
    assert len(results) == len([*products_of_matrices(), *attention_of_matrices()])
    for name, passed, text, kernels in results:
        assert passed, (name, text)
        assert any(kernel.endswith("_of_matrices") for kernel in kernels), (name, kernels)
    modules = [module for module in packages.modules_in(newest.cache) if b"SPV_KHR_cooperative_matrix" in module]
    assert len(modules) >= len(results)
    for number, module in enumerate(modules):
        said = validated(module, newest.cache / f"{number}.spv")
        assert said.returncode == 0, said.stderr


_SEQUENCES = """
import json
import numpy as np
from tests.ops.gpu.test_decoder_kernels import check_attention, gpu
context, rng = gpu.open(vulkan=True), np.random.default_rng(7)
for heads, kv_heads, size, tokens, window, softcap in (
    (4, 2, 32, 41, 0, 0.0), (7, 1, 24, 30, 5, 0.0), (2, 2, 136, 35, 70, 2.0)
):
    check_attention(
        context, rng, heads=heads, kv_heads=kv_heads, size=size, tokens=tokens, window=window, softcap=softcap,
        has_blocks=window != 5, has_sinks=window == 5, in_tiles=True, matrices=(8, 8, 8, 8),
    )
print(json.dumps("right"))
"""


def test_sequences_among_others_are_attended_by_matrices(newest):
    """Rows of a tile that are no multiple of a token's heads, keys no multiple of a chunk's, and heads of slices."""
    assert newest(_SEQUENCES) == "right"


@pytest.mark.parametrize("units", [(16, 16, 16, 32), (16, 16, 16, 64), (16, 8, 16, 32), (8, 16, 16, 32)])
@pytest.mark.parametrize(("heads", "size"), [(4, 64), (7, 80), (4, 128), (2, 256), (8, 512)])
def test_attention_for_other_units_is_valid(units, heads, size, newest, tmp_path):
    """Modules for RDNA 3, in both sizes of subgroups, and for units of NVIDIA and Intel, which no device ran; they take
    32 KiB of a work-group's memory at most."""
    del newest  # has the validator
    kernel, _ = testing.gpu.attention_of_sequence(
        heads, 1, size, 0.0, True, in_tiles=True, cache="float16", has_sinks=True, matrices=units
    )
    said = validated(testing.gpu.spirv(kernel), tmp_path / "kernel.spv")
    assert said.returncode == 0, said.stderr
    declared = re.findall(r"shared (?:uint|float) \w+\[([0-9 *]+)\];", testing.gpu.generate(kernel))
    assert len(declared) == 6
    assert sum(4 * eval(count) for count in declared) <= 2**15  # noqa: S307


_MODEL = """
import json, sys
from pathlib import Path
import numpy as np
from tests.npu.decoders import Session, read_nodes
from tests.ops.device import testing
path, hidden = sys.argv[1:]
hidden = np.load(hidden)
found = []
for matrices in ("off", "on"):
    device = testing.gpu.SessionDevice(rounds=True, vulkan=True, half=False, matrices=matrices)
    session = Session(device, *read_nodes(Path(path)))
    logits, past = session.run(hidden[:20], 20, session.past(48, np.float32))
    after, _ = session.run(hidden[20:], len(hidden), past)
    found.append([logits.ravel().tolist(), after.ravel().tolist()])
print(json.dumps(found))
"""


def test_prompts_of_model_are_multiplied_by_matrices(newest, models, tmp_path):
    """Both turns' logits are those of integer dots, within a share of their spread: 2^-9 of each product, and the same
    again for what follows from it, in two layers of four products each."""
    hidden = hidden_of(models, "llama", np.arange(3, 37))
    np.save(tmp_path / "hidden.npy", hidden)
    dots, matrices = newest(_MODEL, str(models.converted("llama", kv_dtype="fp32")), str(tmp_path / "hidden.npy"))
    for expected, found in zip(np.asarray(dots), np.asarray(matrices), strict=True):
        assert (expected != found).any()  # other kernels
        assert np.abs(found - expected).max() < 16 * 2.0**-9 * np.ptp(expected)
        assert expected.argmax() == found.argmax()


def test_units_that_are_wanted_and_missing_are_refused(lavapipe):
    """Debian 12's lavapipe has none; `auto` uses integer dots there."""
    del lavapipe
    case = next(iter(products_of_matrices()))[1](np.random.default_rng(5))
    device = _native.make_device("gpu", {"gpu_api": "vulkan", "gpu_matrices": "on"})
    with pytest.raises(ValueError, match=r"expected matrix units, which gpu_matrices = on asks for, got none on "):
        PreparedCase(case, device)
    PreparedCase(case, _native.make_device("gpu", {"gpu_api": "vulkan"})).run()


def test_words_without_units_are_refused():
    kernel = testing.gpu.Kernel("sum_matrix a = matrix_of(0.0f);", [testing.gpu.Tensor("y", "float", [1])])
    with pytest.raises(RuntimeError, match="expected a kernel with matrix units for words about matrices"):
        testing.gpu.spirv(kernel)
