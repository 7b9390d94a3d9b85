# SPDX-License-Identifier: Apache-2.0
"""Each source's Q4NX blocks: of its bits, without minima where the source has none, and with exactly its values."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Type
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from flownpu.convert import ConversionError, convert, decoder_folder
from flownpu.convert.graph import data_file
from flownpu.convert.graph.file import SMALL_FILES
from flownpu.convert.output import output_folder
from flownpu.model.converted import ConvertedModel
from flownpu.ops import q4nx
from tests.convert.conftest import TinyModel, write_tiny
from tests.convert.sources.gguf_files import write_model
from tests.convert.sources.prequantised_checkpoints import Form, write_prequantised
from tests.convert.sources.test_gguf import blocks_of

PACKED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
TABLES = ("embed_tokens", "lm_head")

Source = tuple[Path, TinyModel]
Make = Callable[[Path], Source]


def checkpoint(folder: Path) -> Source:
    tiny = write_tiny("llama", folder / "checkpoint")
    return tiny.folder, tiny


def gguf_file(kind: Type, **others: Type) -> Make:
    """A GGUF file whose tensors are all of one type, except those named in `others`."""

    def make(folder: Path) -> Source:
        tiny = write_model(folder, type_of=lambda name: others.get(name.split(".")[-2], kind))
        return folder / "model.gguf", tiny

    return make


def prequantised(form: Form, change: Callable[[dict[str, NDArray[Any]]], None] = lambda _: None) -> Make:
    def make(folder: Path) -> Source:
        tiny = write_prequantised(folder, "llama", form)
        path = tiny.folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)
        return tiny.folder, tiny

    return make


def zero_point_of_nine(tensors: dict[str, NDArray[Any]]) -> None:
    """One group of the value projections has the zero point 9, which gptq stores as 8."""
    for layer in range(3):
        words = tensors[f"model.layers.{layer}.self_attn.v_proj.qzeros"].view(np.uint32)
        words[-1, -1] = words[-1, -1] & 0x0FFFFFFF | 0x80000000


SYMMETRIC = Form(symmetric=True)
BYTES, BYTES_WITH_MINIMA = q4nx.EIGHT_BITS, q4nx.EIGHT_BITS_WITH_MINIMA
# The source of each case, and the weights and tables of a layer that are stored without minima. In the cases of 8 bits,
# the layouts of all that are not narrow.
CASES: dict[str, tuple[Make, tuple[str, ...] | dict[str, q4nx.Layout]]] = {
    "floats": (checkpoint, ()),
    "Q4_0": (gguf_file(Type.Q4_0), (*TABLES, *PACKED)),
    "Q4_1": (gguf_file(Type.Q4_1), ()),
    "Q8_0": (gguf_file(Type.Q8_0), dict.fromkeys((*TABLES, *PACKED), BYTES)),
    "a mixed file": (
        gguf_file(Type.Q4_0, v_proj=Type.Q4_1, up_proj=Type.F16),
        ("embed_tokens", "lm_head", "o_proj", "down_proj"),
    ),
    "a file of 4 and 8 bits": (
        gguf_file(Type.Q4_1, embed_tokens=Type.Q8_0, v_proj=Type.Q5_0, gate_proj=Type.Q8_0, up_proj=Type.Q4_0),
        {"embed_tokens": BYTES, "qkv_proj": BYTES_WITH_MINIMA, "gate_up_proj": BYTES},
    ),
    "gptq": (prequantised(Form()), ()),
    "symmetric gptq": (prequantised(SYMMETRIC), PACKED),
    "symmetric gptq_v2": (prequantised(dataclasses.replace(SYMMETRIC, version="gptq_v2", order="plain")), PACKED),
    "gptq with one other zero point": (
        prequantised(SYMMETRIC, zero_point_of_nine),
        ("o_proj", "gate_up_proj", "down_proj"),
    ),
    "symmetric gptq in act-order": (prequantised(dataclasses.replace(SYMMETRIC, group=64, order="act")), ()),
    "symmetric gptq of 8 bits": (prequantised(dataclasses.replace(SYMMETRIC, bits=8)), dict.fromkeys(PACKED, BYTES)),
    "gptq of 8 bits": (prequantised(Form(bits=8)), dict.fromkeys(PACKED, BYTES_WITH_MINIMA)),
    "awq": (prequantised(Form("awq", 64)), ()),
    "awq with zero points of 8": (prequantised(Form("awq", 64, symmetric=True)), PACKED),
}


@pytest.mark.parametrize("case", CASES)
def test_layouts_hold_same_values(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, symmetric = CASES[case]
    source, tiny = make(tmp_path)
    sizes = list[int]()

    def spy(*args: Any, size: int, **options: Any) -> Any:
        sizes.append(size)
        return output_folder(*args, size=size, **options)

    monkeypatch.setattr(decoder_folder, "output_folder", spy)
    monkeypatch.setattr(data_file, "ALIGNMENT", 1)  # such small weights take as many whole pages in either layout
    convert(source, tmp_path / "model")
    blocks = blocks_of(tmp_path / "model")
    assert len(blocks) == 2 + 3 * len(PACKED)
    layouts = symmetric if isinstance(symmetric, dict) else dict.fromkeys(symmetric, q4nx.SYMMETRIC)
    for name, tensor in blocks.items():
        assert q4nx.layout_of(tensor) == layouts.get(name.split(".")[-1], q4nx.NARROW), name
    model = ConvertedModel(tmp_path / "model")
    for part in model.projections():
        if case == "gptq with one other zero point" and part.name.endswith("v_proj"):
            continue  # this weight was changed, and the reference's was not
        stored = tiny.reference.get_parameter(("" if part.name == "lm_head" else "model.") + f"{part.name}.weight")
        codes = model.quantized(part.initializer, part.first, part.first + part.rows, part.columns)
        np.testing.assert_array_equal(q4nx.dequantize_codes(codes), stored.detach().numpy(), err_msg=part.name)
    # The space that conversion asked for on the disk.
    large = sum(path.stat().st_size for pattern in ("*.data", "*token*") for path in (tmp_path / "model").glob(pattern))
    assert sizes == [large + SMALL_FILES]


def test_symmetric_weight_equals_narrow_without_minima(tmp_path: Path) -> None:
    """Compares the bytes of query and key rows of two models whose sources differ in the values' type alone."""
    source, _ = gguf_file(Type.Q4_0)(tmp_path)
    convert(source, tmp_path / "symmetric")
    source, _ = gguf_file(Type.Q4_0, v_proj=Type.Q4_1)(tmp_path)
    convert(source, tmp_path / "narrow")
    symmetric, narrow = (blocks_of(tmp_path / name)["layers.1.self_attn.qkv_proj"] for name in ("symmetric", "narrow"))
    # 96 rows of queries and 32 of keys are 4 rows of blocks; the values' rows are the fifth.
    scales, minima, codes = narrow[:4, :, :64], narrow[:4, :, 64:128], narrow[:4, :, 128:]
    np.testing.assert_array_equal(symmetric[:4], np.concatenate([scales, codes], axis=-1))
    floats = [np.ascontiguousarray(p).view(q4nx.BFLOAT16).astype(np.float32) for p in (scales, minima)]
    np.testing.assert_array_equal(floats[1], -8 * floats[0])


@pytest.mark.parametrize(
    ("weights", "layouts"),
    [
        ("q4", {}),
        ("q8", dict.fromkeys((*TABLES, *PACKED), BYTES)),
        ("8/4/4", {"qkv_proj": BYTES, "o_proj": BYTES}),
        ("4/8/4", dict.fromkeys(TABLES, BYTES)),
        ("4/4/8", {"gate_up_proj": BYTES, "down_proj": BYTES}),
    ],
)
def test_weights_option_gives_bits_by_place(weights: str, layouts: dict[str, q4nx.Layout], tmp_path: Path) -> None:
    source, _ = checkpoint(tmp_path)
    original = load_file(source / "model.safetensors")
    convert(source, tmp_path / "model", weights=weights)
    for name, tensor in blocks_of(tmp_path / "model").items():
        assert q4nx.layout_of(tensor) == layouts.get(name.split(".")[-1], q4nx.NARROW), name
    model = ConvertedModel(tmp_path / "model")
    for part in model.projections():
        stored = original[("" if part.name == "lm_head" else "model.") + f"{part.name}.weight"]
        exact = stored.astype(np.float32)
        made = q4nx.dequantize_codes(
            model.quantized(part.initializer, part.first, part.first + part.rows, part.columns)
        )
        # Half a step, which is the largest magnitude of 32 weights / 127 with an error of 2^-8, rounded to bfloat16.
        if part.initializer.split(".")[-1] in layouts:
            largest = np.abs(exact.reshape(len(exact), -1, 32)).max(axis=-1)
            bound = np.repeat(largest / 127 / 2 * (1 + 2.0**-8), 32, axis=1)
            assert (np.abs(made - exact) <= bound * (1 + 2.0**-20)).all(), part.name


def test_8_bit_codes_are_quantised_again_for_q4(tmp_path: Path) -> None:
    source, _ = gguf_file(Type.Q8_0)(tmp_path)
    convert(source, tmp_path / "model", weights="q4")
    assert {q4nx.layout_of(tensor) for tensor in blocks_of(tmp_path / "model").values()} == {q4nx.NARROW}


@pytest.mark.parametrize("weights", ["q5", "8/4", "8/4/5", "4/4/4/4", ""])
def test_unknown_weights_are_refused(weights: str, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=f'each 4 or 8, such as 8/4/4, got "{weights}"'):
        convert(checkpoint(tmp_path)[0], tmp_path / "model", weights=weights)


def test_weights_of_graph_are_refused(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "genai_config.json").write_text("{}")
    with pytest.raises(ConversionError, match="--weights takes Hugging Face checkpoints and GGUF files, not graphs"):
        convert(tmp_path / "export", tmp_path / "model", weights="q8")
