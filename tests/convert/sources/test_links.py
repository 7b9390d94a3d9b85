# SPDX-License-Identifier: Apache-2.0
"""Models whose files are links, as in Hugging Face's cache, or have several names are read like plain files."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from flownpu.convert import convert
from flownpu.convert.errors import ConversionError
from flownpu.convert.graph.file import check_data, load_graph
from flownpu.errors import FlowNPUError
from flownpu.explain.overview import explain
from flownpu.generate.language_model import LanguageModel, Sampling, Timing
from flownpu.generate.speculative.model import Speculation
from flownpu.model.integrity import damage
from flownpu.model.onnx_file import load_model, reading
from flownpu.verify.runs import GraphRun

K, M = 64, 32
WEIGHT = np.random.default_rng(0).standard_normal((K, M)).astype(np.float32)


def linked_from_a_cache(source: Path, folder: Path) -> None:
    """Every file is a link to another folder's, under another name."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(source.iterdir())):
        shutil.copyfile(file, blobs / f"{number:040x}")
        (folder / file.name).symlink_to(Path("..") / "blobs" / f"{number:040x}")


def with_second_names(source: Path, folder: Path) -> None:
    for file in source.iterdir():
        os.link(file, folder / file.name)


def with_links_within(source: Path, folder: Path) -> None:
    """The weights are in a folder of the folder."""
    (folder / "parts").mkdir()
    for file in source.iterdir():
        shutil.copyfile(file, folder / "parts" / file.name)
        (folder / file.name).symlink_to(Path("parts") / file.name)


FORMS = [linked_from_a_cache, with_second_names, with_links_within]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of optimum's: one product, whose weight is in model.onnx.data."""
    folder = tmp_path_factory.mktemp("plain")
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[N,{K}] x) => (float[N,{M}] y) {{ y = MatMul (x, w) }}'
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(WEIGHT, "w"))
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(params=FORMS, ids=lambda form: str(form.__name__))
def linked(plain: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path / "snapshot"
    folder.mkdir()
    request.param(plain, folder)
    return folder


def test_weights_behind_links_are_read(linked: Path) -> None:
    """The function with which all commands read graphs; numbers are read, not only sizes."""
    model = load_model(linked / "model.onnx", purpose="this test")
    np.testing.assert_array_equal(model.graph.initializers["w"].const_value.numpy(), WEIGHT)
    assert [path.name for path in check_data(load_graph(linked / "model.onnx"), linked / "model.onnx")] == [
        "model.onnx.data"
    ]


def test_folder_of_links_is_converted_like_files(plain: Path, linked: Path, tmp_path: Path) -> None:
    convert(plain, tmp_path / "expected")
    convert(linked, tmp_path / "found")
    assert damage(tmp_path / "found") == []
    for name in ("model.onnx", "model.onnx.data"):
        found = tmp_path / "found" / name
        assert not found.is_symlink()
        assert found.read_bytes() == (tmp_path / "expected" / name).read_bytes()
    assert explain(linked / "model.onnx", {"device": "cpu"}).weight_bytes == {"float": WEIGHT.nbytes}


def test_graphs_from_memory_find_weights_behind_links(converted: Callable[..., Path], tmp_path: Path) -> None:
    """ONNX Runtime then takes data from one folder only, and follows no link out of it."""
    folder = tmp_path / "snapshot"
    folder.mkdir()
    linked_from_a_cache(converted(), folder)
    tokens = np.arange(20, 30)
    runs = [GraphRun(path / "model.onnx", 0, None).run(tokens) for path in (converted(), folder)]
    np.testing.assert_array_equal(runs[0].logits, runs[1].logits)
    texts = []
    for path in (converted(), folder):
        model = LanguageModel(path, speculation=Speculation(lookup=True))
        prompt = model.tokens_of_text("The for statement")
        texts.append("".join(model.complete(prompt, 6, Sampling(temperature=0), Timing())))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("how", ["by name", "by link"])
def test_weights_elsewhere_are_refused_as_onnx_runtime_does(how: str, plain: Path, tmp_path: Path) -> None:
    """A model from elsewhere would make a file of this machine its weights."""
    (tmp_path / "secret").write_bytes(WEIGHT.tobytes())
    folder = tmp_path / "model"
    folder.mkdir()
    model = onnx.load(plain / "model.onnx", load_external_data=False)
    entry = next(entry for entry in model.graph.initializer[0].external_data if entry.key == "location")
    if how == "by name":
        entry.value = "../secret"
    else:
        (folder / entry.value).symlink_to(tmp_path / "secret")
    path = folder / "model.onnx"
    onnx.save(model, path)
    with pytest.raises(Exception, match="External data path validation failed"):
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    loaded = load_model(path, purpose="this test")
    with pytest.raises(FlowNPUError, match="outside the base directory"), reading(path):
        loaded.graph.initializers["w"].const_value.numpy()
    with pytest.raises(ConversionError, match=r"tensor w is stored (outside of the folder|in .*, a link to .*secret)"):
        check_data(load_graph(path), path)


def test_long_name_of_onnx_domain_is_understood(plain: Path, tmp_path: Path) -> None:
    """ONNX Runtime takes "ai.onnx" for the domain ""."""
    folder = shutil.copytree(plain, tmp_path / "source")
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    model.opset_import[0].domain = model.graph.node[0].domain = "ai.onnx"
    onnx.save(model, folder / "model.onnx")
    convert(folder, tmp_path / "found")
    convert(plain, tmp_path / "expected")
    assert (tmp_path / "found" / "model.onnx").read_bytes() == (tmp_path / "expected" / "model.onnx").read_bytes()
