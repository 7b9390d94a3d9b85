# SPDX-License-Identifier: Apache-2.0
"""Texts that a decoder's session computes in several calls."""

import numpy as np

CONTEXT = 512


def steps_of(*stops):
    return list(zip((0, *stops[:-1]), stops, strict=True))


def run_all(session, hidden, steps, past=None, **options):
    """Logits of the last token of each step."""
    past = session.past(CONTEXT) if past is None else past
    return np.array([session.run(hidden[start:stop], stop, past, **options)[0] for start, stop in steps])
