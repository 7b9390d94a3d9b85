# SPDX-License-Identifier: Apache-2.0
"""Peers: other engines that run 4-bit models on a CPU, to be measured beside this project's own.

A peer is one file, with the packages that it needs, a converter and a class Engine. Converter and engine run in a
Python environment of the peer's own (`worker.py`), where this package is not installed. `export.py` writes a model in
the form that all the converters read (`exported.py`).
"""

import hashlib
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flownpu.bench.measurement import WORKER, Engine
from flownpu.peers import export, exported, llama_cpp, onnxruntime_genai, openvino_genai
from flownpu.peers.environment import cache_folder, finished_folder, make_environment, model_key, run

__all__ = ["OWN", "PEERS", "Peer", "own_engine", "prepare", "remove_exported"]

OWN = "flownpu"


@dataclass(frozen=True)
class Peer:
    """A peer's file, and what its environment is made of; see `make_environment`."""

    script: Path
    requirements: tuple[str, ...]
    from_source: tuple[str, ...] = ()
    build_environment: Mapping[str, str] = field(default_factory=dict)


PEERS = {
    "ort-cpu": Peer(Path(onnxruntime_genai.__file__), onnxruntime_genai.REQUIREMENTS),
    "llama.cpp": Peer(
        Path(llama_cpp.__file__), llama_cpp.REQUIREMENTS, llama_cpp.FROM_SOURCE, llama_cpp.BUILD_ENVIRONMENT
    ),
    # To compare with FlowNPU's AVX2 kernels on any processor: `flownpu bench --option cpu_isa=avx2`.
    "llama.cpp-avx2": Peer(
        Path(llama_cpp.__file__), llama_cpp.REQUIREMENTS, llama_cpp.FROM_SOURCE, llama_cpp.AVX2_BUILD_ENVIRONMENT
    ),
    "openvino": Peer(Path(openvino_genai.__file__), openvino_genai.REQUIREMENTS),
}


def own_engine(model: Path, *, provider: str, options: Mapping[str, str]) -> Engine:
    """This project's engine, which runs in this environment; `options` are those of FlowNPU's provider."""
    script = Path(__file__).with_name("own.py")
    return Engine(OWN, Path(sys.executable), script, model, {"provider": provider, **options})


def prepare(
    name: str,
    model: Path,
    *,
    say: Callable[[str], None],
    progress: export.ExportProgress,
    peer: Peer | None = None,
    verb: str = "convert",
) -> Engine:
    """A peer that is ready to be measured: its environment and its form of the model are made, unless they are there.

    Args:
        name: name of the environment.
        model: the folder that `flownpu convert` wrote.
        say: called with a line about what is being done.
        progress: called with the number of exported weights and that of all.
        peer: the peer; None: PEERS[name].
        verb: the converter's function that `worker.py` calls: "convert" or "convert_served".

    Raises:
        FlowNPUError: a package cannot be installed, or the model not be converted.
    """
    peer = peer or PEERS[name]
    python = make_environment(
        name,
        peer.requirements,
        from_source=peer.from_source,
        build_environment=peer.build_environment,
        say=lambda text: say(f"{name}: {text}"),
    )
    key = model_key(model)
    root = cache_folder()
    # Named after the converter, not after the peer: two builds of one engine read the same files.
    converted = root / "models" / (peer.script.stem + verb.removeprefix("convert")) / key
    # The digests of the files that convert: if one changes, the model is converted again.
    exporter = [_digest(Path(str(module.__file__))) for module in (export, exported)]
    with finished_folder(converted, [*exporter, _digest(peer.script)]) as output:
        if output is not None:
            weights = root / "exported" / key
            with finished_folder(weights, exporter) as folder:
                if folder is not None:
                    say(f"{name}: exporting the weights")
                    export.export_model(model, folder, progress=progress)
            say(f"{name}: converting the weights")
            run([python, "-P", WORKER, peer.script, verb, weights, output], root / name / "convert.log")
    return Engine(name, python, peer.script, converted)


def remove_exported(model: Path) -> None:
    """Removes the exported weights of a model, which are needed only while the peers' converters run."""
    shutil.rmtree(cache_folder() / "exported" / model_key(model), ignore_errors=True)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
