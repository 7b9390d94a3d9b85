# SPDX-License-Identifier: Apache-2.0
"""A decoder whose images are blocks of tokens that see one another, on the emulated array, through the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from flownpu.convert import convert
from flownpu.npu.artifacts import build_artifacts
from tests.aie.words import read_index
from tests.convert.picture_models import TEXT, reference, write_pictures_checkpoint
from tests.npu.decoders import Session, npu, read_nodes
from tests.npu.rounding import decoder_error

CONTEXT, IMAGE, LAYERS = 640, 256, TEXT["num_hidden_layers"]
CACHES = 4  # that a session keeps (KvCaches::kMost)
# Dispatches of a chunk: one for the weights of all layers; four for each layer but the last (QKV, attention, output,
# feed-forward); one for the last layer (QKV).
OF_A_CHUNK = 1 + 4 * (LAYERS - 1) + 1


@dataclass
class Folder:
    """A model that takes images, with artifacts for CONTEXT tokens, and transformers' model of it."""

    model: Path
    artifacts: Path
    reference: Any


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    path = tmp_path_factory.mktemp("blocks")
    write_pictures_checkpoint(path / "checkpoint")
    convert(path / "checkpoint", path / "model")
    built = build_artifacts(path / "model", context=CONTEXT)
    assert not any(left.on_host for left in built.left_out)
    return Folder(path / "model", built.folder, reference(path / "checkpoint", path / "model"))


@pytest.fixture(scope="module")
def session(folder: Folder) -> Session:
    return open_session(folder.model, folder.artifacts)


def open_session(model: Path, artifacts: Path) -> Session:
    return Session(npu.NpuDevice(str(artifacts)), *read_nodes(model))


def numbered(*runs: int | str) -> NDArray[np.int32]:
    """The block number of each token, from runs of text (how many tokens) and of images ("image")."""
    numbers, images = list[int](), 0
    for run in runs:
        images += run == "image"
        numbers += [images] * IMAGE if run == "image" else [0] * int(run)
    return np.array(numbers, np.int32)


def logits_of(
    model: Any, hidden: NDArray[np.float32], blocks: NDArray[np.int32], *, causal: bool = False
) -> torch.Tensor:
    """transformers' logits [S, V], with masks by the definition of FlowQKVAttention's bidirectional_blocks."""
    places = np.arange(len(blocks))
    seen = places <= places[:, None]
    if not causal:
        seen |= (blocks == blocks[:, None]) & (blocks > 0)
    near = places > places[:, None] - TEXT["sliding_window"]
    masks = {
        kind: torch.from_numpy(np.where(mask, 0, -np.inf).astype(np.float32))[None, None]
        for kind, mask in (("full_attention", seen), ("sliding_attention", seen & near))
    }
    states = model.model.language_model(inputs_embeds=torch.from_numpy(hidden)[None], attention_mask=masks)
    return model.lm_head(states.last_hidden_state)[0]  # type: ignore[no-any-return]


def embedded(rng: np.random.Generator, model: Any, blocks: NDArray[np.int32]) -> NDArray[np.float32]:
    """Hidden states [S, D]: embeddings of words and, in blocks, random numbers of about their size."""
    ids = torch.from_numpy(rng.integers(100, 4000, len(blocks)))
    with torch.no_grad():
        hidden = model.get_input_embeddings()(ids).numpy()
    features = rng.normal(size=hidden.shape) * hidden.std()
    return np.where(blocks[:, None] > 0, features, hidden).astype(np.float32)


def run_all(
    session: Session, hidden: NDArray[np.float32], blocks: NDArray[np.int32], stops: Sequence[int]
) -> NDArray[np.float32]:
    """Logits of the last token of each call."""
    past, begins = session.past(CONTEXT), [0, *stops[:-1]]
    return np.array(
        [
            session.run(hidden[begin:end], end, past, blocks=blocks[begin:end])[0]
            for begin, end in zip(begins, stops, strict=True)
        ]
    )


# A conversation's runs of text and images, and the positions at which its calls end.
CONVERSATIONS: dict[str, tuple[list[int | str], tuple[int, ...]]] = {
    "text, image, text": ([20, "image", 9], (283, 284, 285)),
    "the image first, and last": (["image", 1], (256, 257)),
    "images apart": ([3, "image", 70, "image", 2], (586, 587)),
    "images side by side": ([5, "image", "image", 2], (518, 519)),
    "deep in a conversation": ([75, "image", 30], (70, 355, 356, 361)),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if stops[-1] > 300 else ())
        for name, (_, stops) in CONVERSATIONS.items()
    ],
)
def test_logits_are_near_transformers(rng: np.random.Generator, name: str, folder: Folder, session: Session) -> None:
    """Compared with transformers, which computes in float32; the bound is that of test_decoder_layers.py.

    Logits with attention that is causal only would be further away than the bound.
    """
    runs, stops = CONVERSATIONS[name]
    blocks, model = numbered(*runs)[: stops[-1]], folder.reference
    hidden = embedded(rng, model, blocks)
    found = run_all(session, hidden, blocks, stops)
    lasts = [stop - 1 for stop in stops]

    def expected() -> torch.Tensor:
        return logits_of(model, hidden, blocks)[lasts]

    with torch.no_grad():
        seen, unseen = expected().numpy(), logits_of(model, hidden, blocks, causal=True)[lasts].numpy()
    error = np.sqrt(np.square(found - seen).mean())
    bound = 2 * decoder_error(model, expected, prompt=True)
    print(f"{name}: {error:.3f}, at most {bound:.3f}; causal: {np.sqrt(np.square(seen - unseen).mean()):.3f}")
    assert error < bound < seen.std() / 4
    assert np.sqrt(np.square(seen - unseen).mean()) > bound


def test_prompt_is_cut_at_images(rng: np.random.Generator, folder: Folder, session: Session) -> None:
    """Each image is a chunk; text before it is one, or single tokens if short; the last token is a dispatch."""
    past = session.past(CONTEXT)

    def dispatches(*runs: int | str) -> int:
        blocks = numbered(*runs)
        hidden = embedded(rng, folder.reference, blocks)
        before = session.device.counts()["dispatches"]
        session.run(hidden, len(blocks), past, blocks=blocks)
        return int(session.device.counts()["dispatches"] - before)

    # Text that is too short for a chunk to be worth it goes token by token.
    programs = read_index(folder.artifacts)[-1]
    least = min(program["sizes"]["fewest"] for program in programs if program["kind"] == "prefill")
    assert dispatches(7, "image", 1) == 7 + OF_A_CHUNK + 1
    assert dispatches(least, "image", least + 1) == 3 * OF_A_CHUNK + 1
    assert dispatches("image", "image") == 2 * OF_A_CHUNK + 1
    assert dispatches(least) == least
    assert dispatches(least + 1) == OF_A_CHUNK + 1


def test_rows_behind_text_are_in_no_block(rng: np.random.Generator, folder: Folder, session: Session) -> None:
    """The rows that pad a prompt on the right, with any block numbers."""
    blocks = numbered(4, "image", 2)
    hidden = embedded(rng, folder.reference, blocks)
    expected, _ = session.run(hidden, len(blocks), session.past(CONTEXT), blocks=blocks)
    padded = np.concatenate([hidden, hidden[-8:]])
    numbers = np.concatenate([blocks, np.full(8, 5)])
    found, _ = session.run(padded, len(padded), session.past(CONTEXT), length=len(blocks), blocks=numbers)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("runs", [(3, "image", 1), (250, 1)], ids=["an image", "a chunk that is not full"])
def test_earlier_memory_content_changes_no_bit(
    rng: np.random.Generator, runs: tuple[int | str, ...], folder: Folder, session: Session
) -> None:
    """Caches that were given up and other buffers are used again with their old content.

    What lies behind the last key is masked. But where XDNA2 multiplies, eight neighbours share an exponent
    (aie/kernels/README.md, "Arithmetic"): large numbers behind the last key would leave fewer bits to those before.
    """
    blocks = numbered(*runs)
    hidden = embedded(rng, folder.reference, blocks)
    fresh = open_session(folder.model, folder.artifacts)
    expected, _ = fresh.run(hidden, len(blocks), fresh.past(CONTEXT), blocks=blocks)
    for _ in range(CACHES):
        large = [np.full_like(tensor, 1e4) for tensor in session.past(CONTEXT)]
        session.run(hidden[:1], CONTEXT, large, blocks=blocks[:1])
    long = np.concatenate([hidden, hidden])[:256]
    session.run(long, len(long), session.past(CONTEXT), blocks=[0] * len(long))
    found, _ = session.run(hidden, len(blocks), session.past(CONTEXT), blocks=blocks)
    assert found.tobytes() == expected.tobytes()


# --- What is refused --------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[NDArray[np.int32]], NDArray[np.int32]], str]] = {
    "cut": (lambda blocks: blocks[:200], "expected images of 256 tokens.*, got 197 tokens .* from position 3 on"),
    "two that are one": (
        lambda blocks: np.concatenate([blocks, np.full(IMAGE, 1)]), "expected images of 256 tokens.*, got 512 tokens",
    ),
    "others": (lambda blocks: np.concatenate([blocks, [0, 7, 7]]), "got 2 tokens that see .* from position 260"),
    "back": (lambda blocks: np.concatenate([blocks, [0, 1]]), "expected the numbers in bidirectional_blocks to grow"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unfit_blocks_are_refused(rng: np.random.Generator, name: str, folder: Folder, session: Session) -> None:
    change, message = REFUSED[name]
    blocks = change(numbered(3, "image"))
    with pytest.raises(RuntimeError, match=message):
        session.run(embedded(rng, folder.reference, blocks), len(blocks), session.past(CONTEXT), blocks=blocks)


def test_artifacts_without_room_for_image_are_refused(rng: np.random.Generator, folder: Folder, tmp_path: Path) -> None:
    """Such artifacts still take text."""
    build_artifacts(folder.model, context=128, output=tmp_path)
    session = open_session(folder.model, tmp_path)
    assert session.lowered.summary.endswith("prompts token by token, no images")
    blocks = numbered(5)
    hidden = embedded(rng, folder.reference, blocks)
    logits, _ = session.run(hidden, 5, session.past(128), blocks=blocks)
    assert np.isfinite(logits).all()
    with pytest.raises(
        RuntimeError, match=r"expected no images, .* got 2 tokens that see one another from position 0 on"
    ):
        session.run(hidden, 5, session.past(128), blocks=[1, 1, 0, 0, 0])


def test_summary_names_images(session: Session) -> None:
    assert session.lowered.summary == (
        "3 layers and the LM head in 1 dispatch a token, prompts in chunks of 256 or 512, images of 256 tokens"
    )
