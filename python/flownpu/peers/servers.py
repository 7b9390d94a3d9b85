# SPDX-License-Identifier: Apache-2.0
"""The servers that `flownpu bench --serve` measures: this project's, and the peers' on the same weights."""

import sys
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

from flownpu.bench.servers import PORT, Server
from flownpu.peers import OWN, Peer, export, llama_cpp, openvino_genai, prepare
from flownpu.peers.environment import cache_folder, finished_folder, run

__all__ = ["SERVED", "own_server", "peer_server"]

SERVED = {
    "openvino": Peer(
        Path(openvino_genai.__file__), (*openvino_genai.REQUIREMENTS, "starlette==1.10.0", "uvicorn==0.54.0")
    ),
    "llama.cpp": Peer(Path(llama_cpp.__file__), ("numpy", "gguf==0.19.0", "cmake==4.4.5", "ninja==1.13.2")),
}
"""Peers that have a server, or a pipeline around which this project has a small server (`openvino_server.py`)."""

# The sources of this package include those of llama.cpp.
_LLAMA_PACKAGE = next(each for each in llama_cpp.REQUIREMENTS if each.startswith("llama-cpp-python"))
_LLAMA_SETTINGS = (
    "-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF "
    "-DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF "
    # The build would download the server's web page.
    "-DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF"
)


def own_server(
    model: Path, *, provider: str, options: Mapping[str, str], threads: int, context: int, clients: int
) -> Server:
    """`flownpu serve`, in this environment.

    Args:
        model: the model's folder.
        provider: value of `--provider`.
        options: options of FlowNPU's provider.
        threads: threads that compute.
        context: most tokens of a prompt and its answer together.
        clients: most clients that ask at the same time: a model that is not paged has as many slots.
    """
    given = [part for key, value in options.items() for part in ("--option", f"{key}={value}")]
    command = "import sys; from flownpu.cli import main; sys.exit(main())"
    limits = ["--context", context, "--threads", threads, "--slots", clients, "--queue", clients]
    line = [sys.executable, "-c", command, "serve", model, "--port", PORT, "--provider", provider, *limits, *given]
    return Server(OWN, tuple(map(str, line)))


def peer_server(
    name: str,
    model: Path,
    *,
    threads: int,
    context: int,
    clients: int,
    say: Callable[[str], None],
    progress: export.ExportProgress,
) -> Server:
    """A peer's server on the same weights; environment, weights and program are made, unless they are there.

    Args:
        name: a key of SERVED.
        model: the folder that `flownpu convert` wrote.
        threads: threads that compute.
        context: most tokens of a prompt and its answer together.
        clients: most clients that ask at the same time.
        say: called with a line about what is being done.
        progress: called with the number of exported weights and that of all.

    Raises:
        FlowNPUError: a package cannot be installed or built, or the model not be converted.
    """
    served = name == "llama.cpp"
    engine = prepare(
        f"{name}-server",
        model,
        peer=SERVED[name],
        verb="convert_served" if served else "convert",
        say=say,
        progress=progress,
    )
    # Room for the tokens of all clients, and as many again for cached prefixes.
    tokens = 2 * clients * context
    if not served:
        script = Path(__file__).with_name("openvino_server.py")
        line = [engine.python, "-P", script, engine.model, PORT, threads, tokens]
        return Server(name, tuple(map(str, line)), version=_pinned(SERVED[name], "openvino-genai"))
    program = _llama_server(engine.python, say=lambda text: say(f"{name}: {text}"))
    (weights,) = engine.model.glob("*.gguf")
    limits = ["--ctx-size", tokens, "--parallel", clients, "--threads", threads, "--threads-batch", threads]
    line = [program, "--model", weights, "--host", "127.0.0.1", "--port", PORT, "--flash-attn", "on", *limits]
    return Server(name, tuple(map(str, line)), version=f"llama-server of {_LLAMA_PACKAGE}")


def _pinned(peer: Peer, package: str) -> str:
    return next(each for each in peer.requirements if each.startswith(f"{package}=="))


def _llama_server(python: Path, *, say: Callable[[str], None]) -> Path:
    """The path of llama.cpp's server, which is built with the CMake beside `python` unless it is there."""
    root = cache_folder() / "llama.cpp-server"
    target = "llama-server"
    with finished_folder(root / "built", [_LLAMA_PACKAGE, _LLAMA_SETTINGS]) as folder:
        if folder is not None:
            say(f"building {target} (minutes)")
            log = root / "build.log"
            how = ("--disable-pip-version-check", "--no-deps", "--no-binary=:all:")
            run([python, "-m", "pip", "download", *how, "--dest", folder, _LLAMA_PACKAGE], log)
            (package,) = folder.glob("*.tar.gz")
            with tarfile.open(package) as archive:
                archive.extractall(folder, filter="data")
            (source,) = folder.glob("*/vendor/llama.cpp")
            programs = python.parent
            generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={programs / 'ninja'}"]
            run([programs / "cmake", "-S", source, "-B", folder / "build", *generator, *_LLAMA_SETTINGS.split()], log)
            run([programs / "cmake", "--build", folder / "build", "--target", target], log)
    return root / "built" / "build" / "bin" / target
