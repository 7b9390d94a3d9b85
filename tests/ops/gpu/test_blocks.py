# SPDX-License-Identifier: Apache-2.0
"""A decoder whose images are blocks of tokens that see one another, as one node on an OpenCL device."""

import numpy as np
import pytest
import torch

from flownpu.convert import convert
from tests.convert.picture_models import TEXT, reference, write_pictures_checkpoint
from tests.decoding import float32_tolerance
from tests.npu.decoders import Session, read_nodes
from tests.npu.run.test_decoder_blocks import embedded, logits_of, numbered
from tests.ops.device import testing

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("pocl", "not_optimised")]

CAPACITY = 640
# A conversation's runs of text and images, and where its calls end. A chunk has 256 tokens, as an image has.
CONVERSATIONS = {
    "images side by side": ([5, "image", "image", 2], (518, 519)),
    "deep in a conversation": ([75, "image", 30], (70, 355, 356, 361)),
}


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


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_logits_equal_cpu(name, made, session, rng):
    """Those of transformers in float32; with causal attention they are further away than the tolerance."""
    runs, stops = CONVERSATIONS[name]
    blocks, model = numbered(*runs)[: stops[-1]], made[1]
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


def test_chunks_end_where_images_do(made, session, rng):
    """Three chunks: 20 tokens of text, the image, and 9 tokens."""
    blocks = numbered(20, "image", 9)
    hidden = embedded(rng, made[1], blocks)
    before = session.device.counts()["dispatches"]
    session.run(hidden, len(blocks), session.past(CAPACITY, np.float32), blocks=blocks)
    # A layer's 8 kernels, the first norm, and once the LM head.
    assert session.device.counts()["dispatches"] - before == 3 * (8 * session.attributes["layers"] + 1) + 1


def test_block_beyond_maximum_is_refused(made, session, rng):
    blocks = np.array([0] * 3 + [1] * 257, np.int32)
    hidden = embedded(rng, made[1], blocks)
    message = (
        r"expected at most 256 tokens that see one another, .* got 257 from position 3 on: set the provider option"
    )
    with pytest.raises(testing.npu.Unsupported, match=message):
        session.run(hidden, len(blocks), session.past(CAPACITY, np.float32), blocks=blocks)


def test_numbers_that_do_not_grow_are_refused(made, session, rng):
    blocks = np.array([1, 1, 0, 1], np.int32)
    hidden = embedded(rng, made[1], blocks)
    with pytest.raises(RuntimeError, match="expected the numbers in bidirectional_blocks to grow"):
        session.run(hidden, len(blocks), session.past(CAPACITY, np.float32), blocks=blocks)
