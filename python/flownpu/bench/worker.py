# SPDX-License-Identifier: Apache-2.0
"""Measures one engine, in a process of its own and in the engine's own environment.

    python -P worker.py ENGINE.py REQUEST.json

It needs numpy and the standard library only. ENGINE.py has a class `Engine` with `version`, `start`, `read` and
`generate_next`, like `engine.py`.

It prints one JSON object per line on stdout; all other output goes to stderr. First comes
{"load_seconds", "version", "memory"}, then for each case {"prefill_seconds", "first_token_seconds", "decode_seconds",
"first_step_seconds", "prefill_joules", "decode_joules"}, at the end {"memory", "placement"}; or {"error"}.
"first_step_seconds" is the part of "decode_seconds" in which a session of two devices switches. Joules are those of the
processor's packages, from the prompt's first token to the first new token and from there on; null without counters that
this process may read.
"""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

POWERCAP = Path("/sys/class/powercap")


def load(path: Path) -> ModuleType:
    """Imports a file under a special name, because an engine's file may have the name of its package."""
    name = f"flownpu_engine_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def random_tokens(seed: int, count: int, vocabulary_size: int) -> Any:
    """Random token ids, int32 [count], the same on every machine; the work does not depend on the text."""
    return np.random.default_rng(seed).integers(0, vocabulary_size, count, dtype=np.int32)


def memory() -> dict[str, int]:
    """Resident bytes of this process: all of them, the part without a file behind it, and the maximum so far."""
    if sys.platform == "win32":
        import psutil  # noqa: PLC0415 only for Windows, where there is no /proc

        info = psutil.Process().memory_info()
        return {"resident": info.rss, "anonymous": info.private, "peak": info.peak_wset}
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    kib = {key: int(fields[key].split()[0]) * 1024 for key in ("VmRSS", "RssAnon", "VmHWM")}
    return {"resident": kib["VmRSS"], "anonymous": kib["RssAnon"], "peak": kib["VmHWM"]}


def energy() -> float | None:
    """Joules that the packages have taken since some time, by their counters (RAPL); None: there are none to be read.

    Before a counter is read it counts on in steps of about a millisecond.
    """
    try:
        packages = [
            counter.parent
            for counter in POWERCAP.glob("intel-rapl:*/name")
            if counter.read_text().startswith("package")
        ]
        return sum(int((package / "energy_uj").read_text()) for package in packages) / 1e6 if packages else None
    except OSError:
        return None


def between(before: float | None, after: float | None) -> float | None:
    """Joules from one reading to another; None: one is missing, or a counter began anew in between."""
    return None if before is None or after is None or after < before else after - before


def run_case(engine: Any, depth: int, prompt: int, generate: int, tokens: Any) -> dict[str, float | None]:
    """Computes `depth` tokens, then the prompt, then generates; times and joules are those of prompt and generation."""
    engine.start(depth + prompt + generate)
    if depth:
        engine.read(tokens[:depth])
    joules = [energy()]
    started = time.perf_counter()
    engine.read(tokens[depth : depth + prompt])
    read = time.perf_counter()
    engine.generate_next()
    first = time.perf_counter()
    joules.append(energy())
    begun = time.perf_counter()
    engine.generate_next()
    second = time.perf_counter()
    for _ in range(generate - 2):
        engine.generate_next()
    done = time.perf_counter()
    joules.append(energy())
    return {
        "prefill_seconds": read - started,
        "first_token_seconds": first - started,
        "decode_seconds": done - begun,
        "first_step_seconds": second - begun,
        "prefill_joules": between(*joules[:2]),
        "decode_joules": between(*joules[1:]),
    }


def measure(module: ModuleType, request: dict[str, Any], report: Any) -> None:
    """Loads the model, warms up, runs the cases."""
    before = memory()
    cases = request["cases"]
    context = max(case["depth"] + case["prompt"] + case["generate"] for case in cases)
    started = time.perf_counter()
    engine = module.Engine(
        Path(request["model"]), threads=request["threads"], context=context, options=request["options"]
    )
    report({"load_seconds": time.perf_counter() - started, "version": engine.version, "memory": before})
    # A first run brings the weights into memory, starts threads and compiles what an engine compiles at first use.
    # The longest prompt as well as the shortest, since an engine may compute them by different kernels.
    for length in sorted({min(case["prompt"] for case in cases), max(case["prompt"] for case in cases)}):
        run_case(engine, 0, length, 2, random_tokens(0, length, request["vocabulary_size"]))
    for index, case in enumerate(cases, 1):
        # Each case has other tokens, because an engine may remember earlier ones.
        tokens = random_tokens(index, case["depth"] + case["prompt"], request["vocabulary_size"])
        report(run_case(engine, case["depth"], case["prompt"], case["generate"], tokens))
    report({"memory": memory(), "placement": getattr(engine, "placement", "")})


def main() -> None:
    """Runs the command line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine, request = map(Path, sys.argv[1:])

    def report(document: dict[str, Any]) -> None:
        print(json.dumps(document), file=answers, flush=True)

    try:
        measure(load(engine), json.loads(request.read_text(encoding="utf-8")), report)
    except Exception as error:
        # The engine's message goes to the user as it is.
        report({"error": str(error) or type(error).__name__})
        raise


if __name__ == "__main__":
    main()
