# SPDX-License-Identifier: Apache-2.0
"""Runs in an engine's own environment: reads a long prompt once, then generates as often as it is asked.

    python -P long_context_worker.py ENGINE.py MODEL THREADS CONTEXT VOCABULARY OPTIONS

OPTIONS is a JSON object. Each line on stdin is {"read": N} or {"generate": N}, each answer {"seconds"}; the first line
on stdout, when the model is loaded, is {"load_seconds"}, the last one {"peak"}.
"""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_WORKER = Path(__file__).parents[2] / "python" / "flownpu" / "peers" / "worker.py"


def _worker() -> Any:
    """`flownpu.peers.worker`, without the package, which peers' environments lack."""
    spec = importlib.util.spec_from_file_location("flownpu_peers_worker", _WORKER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Loads the engine and answers stdin."""
    worker = _worker()
    script, model = map(Path, sys.argv[1:3])
    threads, context, vocabulary = map(int, sys.argv[3:6])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print goes to stderr: stdout has answers only

    def say(**answer: float) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    started = time.perf_counter()
    engine = worker.load(script).Engine(model, threads=threads, context=context, options=json.loads(sys.argv[6]))
    say(load_seconds=time.perf_counter() - started)
    worker.run_case(engine, 0, 64, 4, worker.random_tokens(0, 64, vocabulary))  # warms up
    engine.start(context)
    for line in sys.stdin:
        request = json.loads(line)
        started = time.perf_counter()
        if "read" in request:
            engine.read(worker.random_tokens(1, request["read"], vocabulary))
        else:
            for _ in range(request["generate"]):
                engine.generate_next()
        say(seconds=time.perf_counter() - started)
    say(peak=worker.load(_WORKER.with_name("memory.py")).memory()["peak"])


if __name__ == "__main__":
    main()
