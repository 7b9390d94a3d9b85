# SPDX-License-Identifier: Apache-2.0
"""The storage of a decoder's weights (the option gpu_weights): memory, or an image of it. It changes no bit."""

import numpy as np
import pytest

from tests.loader_double import Way
from tests.npu.decoders import Session, read_nodes
from tests.ops.device import testing
from tests.ops.gpu.test_session import hidden_of

gpu = testing.gpu
TEXEL = 16  # bytes


@pytest.mark.opencl
@pytest.mark.usefixtures("pocl")
def test_logits_from_images_equal_logits_from_buffers(models):
    """A prompt, whose products round activations, and a token, whose products do not."""
    nodes = read_nodes(models.converted("llama", kv_dtype="fp32"))
    hidden = hidden_of(models, "llama", np.arange(3, 9))
    found = {}
    for image in (False, True):
        session = Session(gpu.SessionDevice(rounds=True, image=image), *nodes)
        past = session.past(16, np.float32)
        found[image] = [session.run(hidden[begin:end], end, past)[0] for begin, end in ((0, 5), (5, 6))]
    np.testing.assert_array_equal(found[True], found[False])


@pytest.mark.parametrize(
    ("image", "texels", "storages"),
    [(None, 40, ["buffer", "image"]), (None, 39, ["buffer"]), (False, 40, ["buffer"]), (True, 40, ["image"])],
)
def test_weight_storages_follow_image_limits(image, texels, storages):
    assert gpu.storages_for(image, 40 * TEXEL, texels) == storages


def test_image_beyond_device_limit_is_refused():
    message = (
        r"expected images of memory of 640 bytes, .* got at most 39 texels of 16 bytes on .*: use gpu_weights = buf"
    )
    with pytest.raises(RuntimeError, match=message):
        gpu.storages_for(True, 40 * TEXEL, 39)


@pytest.mark.opencl
@pytest.mark.usefixtures("pocl")
def test_image_refused_by_driver_is_named(models, double):
    double.inject("clCreateImage", 1, Way.ONCE, -10)
    message = r"image of \d+ bytes: clCreateImage ended with CL_IMAGE_FORMAT_NOT_SUPPORTED .* gpu_weights to buffer"
    with pytest.raises(RuntimeError, match=message):
        Session(gpu.SessionDevice(image=True), *read_nodes(models.converted("llama", kv_dtype="fp32")))
