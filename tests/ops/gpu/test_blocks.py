# SPDX-License-Identifier: Apache-2.0
"""A decoder whose images are blocks of tokens that see one another, as one node on an OpenCL device."""

import numpy as np
import pytest
import torch

from flownpu.convert import convert
from tests.convert.picture_models import TEXT, reference, write_pictures_checkpoint
from tests.decoding import float32_tolerance
from tests.npu.decoders import COS_CACHE, Session, read_nodes, with_input
from tests.npu.run.test_decoder_blocks import embedded, logits_of, numbered
from tests.ops.device import testing

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("pocl")]

CAPACITY = 640
# A conversation's runs of text and images, and where its calls end. A chunk has 256 tokens, as an image has.
CONVERSATIONS = {
    "images side by side": (numbered(5, "image", "image", 2), (518, 519)),
    "deep in a conversation": (numbered(75, "image", 30), (70, 355, 356, 361)),
}
# Images of more tokens than a chunk: the first makes room for more, which the second does not fill.
LARGE = np.repeat(np.int32([0, 1, 0, 2, 0]), [30, 301, 5, 290, 4])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The converted model's folder, and transformers' model with its weights."""
    folder = tmp_path_factory.mktemp("blocks")
    write_pictures_checkpoint(folder / "checkpoint")
    convert(folder / "checkpoint", folder / "model", kv_dtype="fp32")
    return folder / "model", reference(folder / "checkpoint", folder / "model")


@pytest.fixture(scope="module")
def session(made, pocl):
    del pocl
    return Session(testing.gpu.SessionDevice(), *read_nodes(made[0]))


def check_logits(session, model, blocks, stops, rng):
    """Compares with transformers in float32; with causal attention logits are further away than the tolerance."""
    blocks = blocks[: stops[-1]]
    hidden = embedded(rng, model, blocks)
    past, found, begin = session.past(CAPACITY, np.float32), [], 0
    for end in stops:
        found.append(session.run(hidden[begin:end], end, past, blocks=blocks[begin:end])[0])
        begin = end
    lasts = [stop - 1 for stop in stops]
    with torch.no_grad():
        seen, causal = (logits_of(model, hidden, blocks, causal=causal)[lasts].numpy() for causal in (False, True))
    tolerance = float32_tolerance(seen, TEXT["num_hidden_layers"], TEXT["intermediate_size"])
    assert np.abs(np.array(found)[:, : seen.shape[1]] - seen).max() <= tolerance
    assert np.abs(seen - causal).max() > 10 * tolerance


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_logits_equal_transformers(name, made, session, rng):
    check_logits(session, made[1], *CONVERSATIONS[name], rng)


def test_images_of_more_tokens_than_chunk_equal_transformers(made, rng):
    session = Session(testing.gpu.SessionDevice(), *read_nodes(made[0]))
    check_logits(session, made[1], LARGE, (334, 630), rng)


def test_large_image_with_tables_of_graph_is_refused(made, rng):
    nodes, outputs = read_nodes(made[0])
    for place, name in ((COS_CACHE, "cos"), (COS_CACHE + 1, "sin")):
        nodes = with_input(nodes, place, name, "float")
    session = Session(testing.gpu.SessionDevice(), nodes, outputs)
    table = np.ones((CAPACITY, session.attributes["attention.head_size"] // 2), np.float32)
    blocks = LARGE[:331]
    with pytest.raises(testing.npu.Unsupported, match=r"expected at most 256 tokens that see one another .* got 301"):
        session.run(
            embedded(rng, made[1], blocks), 331, session.past(CAPACITY, np.float32), blocks=blocks, tables=(table,) * 2
        )


def test_chunks_end_where_images_do(made, session, rng):
    """Three chunks: 20 tokens of text, the image, and 9 tokens."""
    blocks = numbered(20, "image", 9)
    hidden = embedded(rng, made[1], blocks)
    before = session.device.counts()["dispatches"]
    session.run(hidden, len(blocks), session.past(CAPACITY, np.float32), blocks=blocks)
    # A layer's 8 kernels, the first norm, and once the LM head.
    assert session.device.counts()["dispatches"] - before == 3 * (8 * session.attributes["layers"] + 1) + 1


def test_numbers_that_do_not_grow_are_refused(made, session, rng):
    blocks = np.array([1, 1, 0, 1], np.int32)
    hidden = embedded(rng, made[1], blocks)
    with pytest.raises(RuntimeError, match="expected the numbers in bidirectional_blocks to grow"):
        session.run(hidden, len(blocks), session.past(CAPACITY, np.float32), blocks=blocks)
