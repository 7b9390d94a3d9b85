# SPDX-License-Identifier: Apache-2.0
"""`.q4nx` files: the bytes of the public converter's recipe, and messages for damaged files."""

import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from flownpu.ops import q4nx, q4nx_file

BFLOAT16 = ml_dtypes.bfloat16


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    weights = {
        name: q4nx.pack(*q4nx.quantize(rng.standard_normal(shape).astype(np.float32)))
        for name, shape in {"model.layers.0.mlp.up_proj.weight": (64, 300), "lm_head.weight": (32, 256)}.items()
    }
    return {**weights, "model.norm.weight": rng.standard_normal(300).astype(BFLOAT16)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.q4nx"
    q4nx_file.write(path, tensors())
    return path


def assert_unchanged(folder: Path, before: dict[str, bytes]) -> None:
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_bytes_equal_converters_recipe(tmp_path: Path) -> None:
    """GGUF Q4_1 -> torch int8 [blocks, 5120] by the recipe that the public converter follows -> safetensors."""
    weight = np.random.default_rng(0).standard_normal((64, 288)).astype(np.float32)
    stored = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q4_1).reshape(64, 9, 20)
    parameters = torch.from_numpy(np.ascontiguousarray(stored[..., :4]).view(np.float16).astype(np.float32))
    codes = np.concatenate([stored[..., 4:] & 15, stored[..., 4:] >> 4], axis=-1).reshape(64, 288)

    padded = torch.nn.functional.pad(parameters, (0, 0, 0, 16 - 9))  # 512 columns
    by_block = [
        padded[..., i].reshape(2, 32, 2, 8).permute(0, 2, 3, 1).reshape(4, 256).to(torch.bfloat16).view(torch.int8)
        for i in range(2)
    ]
    wide = torch.nn.functional.pad(torch.from_numpy(codes), (0, 512 - 288)).reshape(2, 2, 8, 2, 2, 256)
    nibbles = wide.permute(0, 4, 1, 5, 2, 3).reshape(4, 4096, 2)
    code_bytes = (nibbles[..., 0] | nibbles[..., 1] << 4).view(torch.int8)
    theirs = tmp_path / "theirs.q4nx"
    norm = torch.arange(288, dtype=torch.bfloat16)
    safetensors.torch.save_file({"a.weight": torch.cat([*by_block, code_bytes], dim=1), "norm": norm}, theirs)

    ours = tmp_path / "ours.q4nx"
    blocks = q4nx.pack(*q4nx.from_affine(codes, parameters[..., 0].numpy(), parameters[..., 1].numpy()))
    q4nx_file.write(ours, {"a.weight": blocks, "norm": np.arange(288).astype(BFLOAT16)})

    assert ours.read_bytes() == theirs.read_bytes()
    np.testing.assert_array_equal(q4nx_file.blocks(q4nx_file.read(theirs)["a.weight"], 64, 288), blocks)


def test_read_gives_back_what_was_written(file: Path) -> None:
    found, expected = q4nx_file.read(file), tensors()
    assert found.keys() == expected.keys()
    for name, shape in {"model.layers.0.mlp.up_proj.weight": (64, 300), "lm_head.weight": (32, 256)}.items():
        np.testing.assert_array_equal(q4nx_file.blocks(found[name], *shape), expected[name])
    np.testing.assert_array_equal(found["model.norm.weight"], expected["model.norm.weight"])
    assert found["model.norm.weight"].dtype == BFLOAT16


def test_grid_of_blocks_is_read(tmp_path: Path) -> None:
    blocks = tensors()["model.layers.0.mlp.up_proj.weight"]
    safetensors.torch.save_file({"w": torch.from_numpy(blocks.view(np.int8))}, tmp_path / "grid.q4nx")
    np.testing.assert_array_equal(q4nx_file.blocks(q4nx_file.read(tmp_path / "grid.q4nx")["w"], 64, 300), blocks)


def test_blocks_that_do_not_fit_weight_are_refused(file: Path) -> None:
    weight = q4nx_file.read(file)["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"uint8 \[6, 5120\] for 65 rows and 300 columns, got uint8 \[4, 5120\]"):
        q4nx_file.blocks(weight, 65, 300)
    damaged = weight.copy()
    damaged[2, 100:102] = 0x80, 0xFF  # minus infinity
    with pytest.raises(ValueError, match=r"byte 100 of block \(1, 0\)"):
        q4nx_file.blocks(damaged, 64, 300)


def test_existing_file_without_force_is_kept(file: Path) -> None:
    before = {file.name: file.read_bytes()}
    with pytest.raises(FileExistsError, match=r"model\.q4nx; give another or use force"):
        q4nx_file.write(file, {})
    assert_unchanged(file.parent, before)
    q4nx_file.write(file, {"norm": np.ones(3, BFLOAT16)}, force=True)
    assert list(q4nx_file.read(file)) == ["norm"]


def test_interrupted_write_leaves_files_unchanged(file: Path) -> None:
    before = {file.name: file.read_bytes()}

    def interrupted() -> Iterator[NDArray[Any]]:
        yield np.zeros((1, 5120), np.uint8)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        q4nx_file.write_entries(file, {"w": q4nx_file.Entry("I8", (2, 5120), interrupted)}, force=True)
    assert_unchanged(file.parent, before)


def test_tensors_that_come_in_parts_make_same_file(file: Path, tmp_path: Path) -> None:
    entries = {}
    for name, tensor in tensors().items():
        flat = tensor.reshape(-1, 5120) if tensor.dtype == np.uint8 else tensor
        kind = "I8" if tensor.dtype == np.uint8 else "BF16"
        entries[name] = q4nx_file.Entry(kind, flat.shape, lambda flat=flat: (flat[i : i + 1] for i in range(len(flat))))
    q4nx_file.write_entries(tmp_path / "parts.q4nx", entries)
    assert (tmp_path / "parts.q4nx").read_bytes() == file.read_bytes()


def test_full_disk_leaves_files_unchanged(file: Path) -> None:
    before = {file.name: file.read_bytes()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # writing more fails, as on a full disk
    try:
        with pytest.raises(OSError, match=r"could not write .*model\.q4nx"):
            q4nx_file.write(file, tensors(), force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_unchanged(file.parent, before)


@pytest.mark.parametrize(
    "tensor", [np.ones(3, np.float32), np.ones((2, 5120), np.uint8), np.ones((1, 1, q4nx.NARROW.block_bytes), np.uint8)]
)
def test_write_refuses_other_tensors(tmp_path: Path, tensor: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"tensor 'w': expected wide blocks.* got " + str(tensor.dtype)):
        q4nx_file.write(tmp_path / "w.q4nx", {"w": tensor})
    assert not list(tmp_path.iterdir())


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.q4nx, which does not exist"):
        q4nx_file.read(tmp_path / "nothing.q4nx")
    with pytest.raises(FileNotFoundError, match="which is no file"):
        q4nx_file.read(tmp_path)


def parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def joined(header: dict[str, Any], data: bytes) -> bytes:
    return with_header(json.dumps(header, separators=(",", ":")).encode()) + data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "Q4"}, r"tensor 'lm_head\.weight', byte \d+: expected dtype I8 or BF16.*Q4"),
        ({"dtype": "F32"}, r"tensor 'lm_head\.weight', byte \d+: expected dtype I8 or BF16.*F32"),
        (
            {"shape": [2, 5120]},
            r"tensor 'lm_head\.weight', byte \d+: expected 10240 bytes for I8 \[2, 5120\], got 5120",
        ),
        ({"shape": [2**62, 2**62]}, r"tensor 'lm_head\.weight', byte \d+: expected \d+ bytes"),
        ({"shape": "wide"}, r"tensor 'lm_head\.weight', byte \d+: expected dtype"),
        ({"shape": ["wide", 10**15]}, r"tensor 'lm_head\.weight', byte \d+: expected dtype"),
        ({"data_offsets": [0, 5120]}, r"tensor '.*', byte \d+: expected its data to begin at byte \d+"),
        (
            {"data_offsets": [10**9, 10**9 + 5120]},
            r"tensor 'lm_head\.weight', byte \d+: expected data up to byte 100000",
        ),
        ({"data_offsets": [5120]}, r"tensor 'lm_head\.weight', byte \d+: expected dtype"),
        ({"data_offsets": [600, float("inf")]}, r"tensor 'lm_head\.weight', byte \d+: expected dtype"),
    ],
)
def test_damaged_entry_names_file_tensor_and_byte(file: Path, change: dict[str, Any], message: str) -> None:
    header, data = parts(file.read_bytes())
    header["lm_head.weight"].update(change)
    file.write_bytes(joined(header, data))
    with pytest.raises(q4nx_file.Q4NXFileError, match=rf"model\.q4nx: ({message})"):
        q4nx_file.read(file)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:0], "byte 0: expected the length of a header"),
        (lambda data: data[:5], "byte 0: expected the length of a header"),
        (lambda data: data[:60], r"byte 0: expected the length of a header, got \d+ in a file of 60 bytes"),
        (lambda data: b"\xff" * 8 + data[8:], "byte 0: expected the length of a header, got 18446744073709551615"),
        (lambda data: data[:-1], r"tensor '.*', byte \d+: expected data up to byte \d+, the file has \d+"),
        (lambda data: data + b"?", r"byte \d+: expected the end of the file, got 1 more"),
        (lambda data: data[:8] + b"}" + data[9:], "byte 8: expected a header in JSON"),
        (lambda data: data[:20] + b"\xff" + data[21:], "byte 20: expected a header in UTF-8"),
        (lambda _: with_header(b"[" * 100_000), "byte 8: expected a header in JSON"),
        (lambda _: with_header(b'{"a":' + b"9" * 5000 + b"}"), "byte 8: expected a header in JSON"),
        (lambda _: with_header(b"[]"), "byte 8: expected a JSON object of tensors"),
    ],
)
def test_damaged_file_names_byte(file: Path, damage: Any, message: str) -> None:
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(q4nx_file.Q4NXFileError, match=rf"model\.q4nx: ({message})"):
        q4nx_file.read(file)


def test_other_safetensors_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"w": torch.ones(2, 3)}, path)
    with pytest.raises(q4nx_file.Q4NXFileError, match=r"tensor 'w': expected I8 .* got F32 \[2, 3\]"):
        q4nx_file.read(path)
    safetensors.torch.save_file({"w": torch.ones(2, 3, dtype=torch.int8)}, path)
    with pytest.raises(q4nx_file.Q4NXFileError, match=r"got I8 \[2, 3\]"):
        q4nx_file.read(path)
    safetensors.torch.save_file({"w": torch.ones(2, dtype=torch.float8_e4m3fn)}, path)
    with pytest.raises(q4nx_file.Q4NXFileError, match="got F8_E4M3"):
        q4nx_file.read(path)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["I8", "BF16", "F4"]),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=4), children, max_size=3),
    max_leaves=6,
)
entries = st.fixed_dictionaries({}, optional={"dtype": values, "shape": values, "data_offsets": values}) | values
