# SPDX-License-Identifier: Apache-2.0
"""A hub with the small model of this repository, and folders of its own for each test."""

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from tests.hub.server import Hub, Repository, Server, files_of

# Nearly all tests convert it: it has a fifteenth of the weights of gemma3-topics.
CHECKPOINT = Path(__file__).parents[1] / "fixtures" / "tool-calls"
# Other forms of the same weights, as repositories have them; a download of one of them is a mistake.
OTHER_FORMS = ("pytorch_model.bin", "original/consolidated.00.pth", "consolidated.safetensors", "onnx/model.onnx")


@pytest.fixture
def checkpoint() -> Path:
    """The folder of the hub's model; a file of tests may have another."""
    return CHECKPOINT


@pytest.fixture
def hub(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the model `someone/topics`; huggingface_hub, the cache and the models' folder belong to the test."""
    found = Hub({"someone/topics": Repository(files_of(checkpoint) | dict.fromkeys(OTHER_FORMS, b"not needed"))})
    server = Server(found)
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    # For processes that the test starts.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", found.address)
    # For this process, in which huggingface_hub has read its variables already.
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", found.address)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", found.address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
    yield found
    server.shutdown()
    server.server_close()
