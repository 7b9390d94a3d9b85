# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of decoders: sessions of small models, and what they get for tokens."""

import pytest
import torch

from flownpu.aie.programs.decode import DECODE_WAYS
from tests.npu.decoders import Session, npu, read_nodes
from tests.npu.run.steps import CONTEXT


@pytest.fixture(scope="module")
def session_of(models):
    """Opens a session of a model, with artifacts for CONTEXT tokens; `options` are those of its conversion."""
    opened = {}

    def session(name, *, new=False, ways=DECODE_WAYS, **options):
        key = name, ways, *options.items()
        if new or key not in opened:
            device = npu.NpuDevice(str(models.artifacts(name, CONTEXT, ways, **programs_of(options))))
            opened[key] = Session(device, *read_nodes(models.converted(name, **options)))
        return opened[key]

    return session


@pytest.fixture(scope="module")
def embed(models):
    """The hidden states [S, D] that the layers of a model get for tokens."""

    def embedded(name, ids):
        with torch.no_grad():
            return models.checkpoint(name).reference.get_input_embeddings()(torch.from_numpy(ids)).numpy()

    return embedded


def programs_of(options):
    """The options of a conversion on which programs depend: the others share artifacts."""
    return {name: value for name, value in options.items() if name in ("logits", "weights") or value == "int8"}
