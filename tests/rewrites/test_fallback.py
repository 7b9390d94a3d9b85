# SPDX-License-Identifier: Apache-2.0
"""on_unsupported for models from every source: an error, a warning, or silence; and one line about placement."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from flownpu.convert import convert
from flownpu.graph_rewrites.testing import Array
from tests.convert.conftest import write_tiny
from tests.convert.sources.gguf_files import write_gguf

PROVIDER = "FlowNPUExecutionProvider"
PROMPT = [2, 17, 5, 9]
WINDOW = 16  # the export's; its cache has at least as many tokens
PATHS = ["unconverted GenAI", "converted GenAI", "checkpoint", "GGUF", "optimum"]
# No device has Round, and its effect on logits is easily computed.
FOREIGN = "Round 'foreign': the cpu device has no ai.onnx::Round"


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the folder of a path's model, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("paths")
    made: dict[str, Path] = {}

    def make(path: str) -> Path:
        if path == "optimum":
            found: Path = request.getfixturevalue("folded")["gemma3"]
            return found
        if "GenAI" in path:
            source = request.getfixturevalue("exports")["gemma3"]
            if path == "unconverted GenAI":
                return source  # type: ignore[no-any-return]
        else:
            source = folder / f"{path} source"
            source.mkdir()
            tiny = write_tiny("llama", source)
            if path == "GGUF":
                source = folder / "model.gguf"
                write_gguf(source, tiny.reference)
        convert(source, folder / path)
        return folder / path

    def model(path: str) -> Path:
        if path not in made:
            made[path] = make(path)
        return made[path]

    return model


@pytest.fixture
def start(genai: Any, ep_devices: list[Any]) -> Any:
    """Starts a model folder in GenAI or ONNX Runtime; returns a function that gives the logits [V] after PROMPT."""

    def in_genai(folder: Path, options: dict[str, str]) -> Any:
        config = genai.Config(str(folder))
        config.clear_providers()
        config.append_provider(PROVIDER)
        for key, option in options.items():
            config.set_provider_option(PROVIDER, key, option)
        # GenAI's own default shows errors only.
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"log_severity_level": 2}}}}))
        model = genai.Model(config)

        def run() -> Array:
            parameters = genai.GeneratorParams(model)
            parameters.set_search_options(max_length=WINDOW + len(PROMPT))
            generator = genai.Generator(model, parameters)
            generator.append_tokens(PROMPT)
            logits: Array = generator.get_logits()[0, -1].copy()
            return logits

        return run

    def in_onnxruntime(folder: Path, options: dict[str, str]) -> Any:
        configuration = ort.SessionOptions()
        configuration.add_provider_for_devices(ep_devices[:1], options)
        session = ort.InferenceSession(str(folder / "model.onnx"), configuration)

        def run() -> Array:
            count = len(PROMPT)
            given = {"input_ids": [PROMPT], "attention_mask": [[1] * count], "position_ids": [list(range(count))]}
            feeds = {
                value.name: np.array(given[value.name])
                if value.name in given
                else np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
                for value in session.get_inputs()
            }
            logits: Array = session.run(["logits"], feeds)[0][0, -1]
            return logits

        return run

    def start_it(folder: Path, **options: str) -> Any:
        run = in_genai if (folder / "genai_config.json").exists() else in_onnxruntime
        return run(folder, {"device": "cpu", **options})

    return start_it


@pytest.fixture
def with_a_foreign_node(models: Any, tmp_path: Path) -> Any:
    """Copies a path's model, and adds a node that rounds its logits to integers."""

    def change(path: str) -> Path:
        folder = tmp_path / "foreign"
        shutil.copytree(models(path), folder)
        model = onnx.load(folder / "model.onnx", load_external_data=False)
        (producer,) = (node for node in model.graph.node if "logits" in node.output)
        producer.output[list(producer.output).index("logits")] = "exact"
        scaled = onnx.helper.make_node("Round", ["exact"], ["logits"], name="foreign")
        model.graph.node.append(scaled)
        (folder / "model.onnx").write_bytes(model.SerializeToString())
        return folder

    return change


def lines(text: str) -> list[str]:
    """The lines about placement."""
    return [line for line in text.splitlines() if line.startswith("FlowNPU: ") and " nodes" in line]


@pytest.mark.parametrize("path", PATHS)
def test_model_without_fallback_logs_one_line(
    path: str, models: Any, start: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = start(models(path), placement="stderr")  # by default, nothing may be left
    run()
    run()
    (line,) = lines(capfd.readouterr().err)
    assert "in 1 partition on cpu" in line
    assert "left to" not in line
    report = tmp_path / "placement.json"
    start(models(path), placement=str(report))
    placement = json.loads(report.read_text())
    assert placement["left"] == placement["inlined"] == []
    assert placement["claimed"] == placement["nodes"]


@pytest.mark.parametrize("path", PATHS)
def test_left_node_follows_choice(
    path: str, models: Any, with_a_foreign_node: Any, start: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = with_a_foreign_node(path)
    for options in ({}, {"on_unsupported": "error"}):
        with pytest.raises(Exception, match="does not take 1 of the model's") as raised:
            start(folder, **options)
        assert FOREIGN in str(raised.value)
        assert "set the provider option on_unsupported to warn or cpu" in str(raised.value)
    expected = np.round(start(models(path))())
    capfd.readouterr()
    for choice in ("warn", "cpu"):
        run = start(folder, on_unsupported=choice, placement="stderr")
        printed = capfd.readouterr().err
        (line,) = lines(printed)
        assert line.endswith("; left to ONNX Runtime's CPU provider: Round")
        assert (FOREIGN in printed) == (choice == "warn")
        np.testing.assert_array_equal(run(), expected)
