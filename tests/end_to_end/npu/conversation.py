# SPDX-License-Identifier: Apache-2.0
"""A conversation in GenAI with the small model on each of some devices, in one process of a machine with an NPU.

    python -m tests.end_to_end.npu.conversation LIBRARY PROMPTS MODEL...

prints a JSON document: for each model's folder, whose configuration names its device, the tokens of two turns and of
one after a rewind, and a digest of the logits that they were chosen from. PROMPTS is a JSON list of three lists of
tokens.
"""

import gc
import hashlib
import json
import sys
from typing import Any

import onnxruntime_genai as og

from flownpu import registration
from tests.end_to_end.replies import generator_of, reply
from tests.npu.xrt import Driver

CAPACITY = 512
KEPT = 20  # tokens that the rewind leaves


def converse(folder: str, prompts: list[list[int]]) -> dict[str, Any]:
    """Two turns, then another after a rewind to the first KEPT tokens."""
    generator = generator_of(og.Model(folder), CAPACITY)
    replies = [reply(generator, prompts[0], 3), reply(generator, prompts[1], 2)]
    generator.rewind_to(KEPT)
    replies.append(reply(generator, prompts[2], 2))
    logits = b"".join(row.tobytes() for one in replies for row in one.logits)
    return {"tokens": [one.tokens for one in replies], "sum": hashlib.sha256(logits).hexdigest()}


def main(library: str, prompts: str, *folders: str) -> None:
    driver = Driver()
    og.register_execution_provider_library(registration.get_ep_name(), library)
    document: dict[str, Any] = {folder: converse(folder, json.loads(prompts)) for folder in folders}
    gc.collect()
    driver.settle()
    document["violations"] = driver.violations()
    document["alive"] = driver.alive()
    print(json.dumps(document))


if __name__ == "__main__":
    main(*sys.argv[1:])
