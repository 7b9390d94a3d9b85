# SPDX-License-Identifier: Apache-2.0
"""Sessions in GenAI, one after the other in one process of a machine with an NPU: what they leave behind.

    python -m tests.end_to_end.npu.many_sessions LIBRARY MODEL PROMPT COUNT

PROMPT is a JSON list of tokens. Prints a JSON document: the tokens of all sessions, each once; and after the first, the
third, the tenth, the hundredth .. and the last one: the files open in this process, what is open in the driver, and the
resident memory in bytes.
"""

import gc
import json
import sys
from pathlib import Path

import onnxruntime_genai as og
import psutil

from flownpu import registration
from tests.end_to_end.replies import generator_of, reply
from tests.npu.xrt import Driver

CAPACITY = 64
NEW_TOKENS = 2


def converse(folder: str, prompt: list[int], number: int) -> tuple[int, ...]:
    """A reply of a session, which is then closed: in order, with the model first, or in the middle of a reply."""
    model = og.Model(folder)
    generator = generator_of(model, CAPACITY)
    if number % 3 == 1:
        del model
    tokens = reply(generator, prompt, NEW_TOKENS).tokens
    if number % 3 == 2:
        generator.generate_next_token()
    return tuple(tokens)


def main(library: str, folder: str, prompt: str, count: str) -> None:
    driver = Driver()
    og.register_execution_provider_library(registration.get_ep_name(), library)
    tokens: set[tuple[int, ...]] = set()
    left = []
    for number in range(int(count)):
        tokens.add(converse(folder, json.loads(prompt), number))
        gc.collect()
        driver.settle()
        if number + 1 in (1, 3, 10, 100, 300, int(count)):
            files = len(list(Path("/proc/self/fd").iterdir()))
            memory = psutil.Process().memory_info().rss
            left.append({"sessions": number + 1, "files": files, "driver": driver.alive(), "memory": memory})
            print(left[-1], file=sys.stderr, flush=True)
    print(json.dumps({"tokens": sorted(tokens), "left": left, "violations": driver.violations()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
