# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests of all layers: the built library, and ONNX Runtime with it registered."""

from __future__ import annotations

import os

# No telemetry from test machines; onnxruntime reads this when it is imported.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
# pytest-xdist sets COLUMNS in each of its processes, and rich would keep this width when the command line is imported.
os.environ.pop("COLUMNS", None)
# There are more processes than cores: a second thread of torch in each would only spin.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import fcntl
import gc
import hashlib
import importlib.util
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import builds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    import onnxruntime

    from tests.loader_double import Double
    from tests.npu.models import Models


# Processes that a shell starts in the background ignore SIGINT, and so would the processes that tests of Ctrl-C start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _use_native_of(built: Path) -> None:
    """Loads the build's flownpu._native in place of the installed one, before anything imports it."""
    for file in built.glob("_native*.so"):
        spec = importlib.util.spec_from_file_location("flownpu._native", file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["flownpu._native"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


# Set for the sanitized build, whose flownpu._native is tested, too, not only its execution provider.
if folder := os.environ.get("FLOWNPU_TESTING_DIR"):
    _use_native_of(Path(folder))


def _let_idle_threads_sleep() -> None:
    """Turns off spinning threads, by default, in sessions of ONNX Runtime's Python interface.

    A session's thread spins for a million pauses, tens of milliseconds, after its last task: with as many processes as
    cores it takes the core from another process. That was a fifth of the CPU time of tests of single operators.
    """
    import onnxruntime
    from onnxruntime.capi import _pybind_state as state

    class SessionOptions(state.SessionOptions):  # type: ignore[misc]  # shipped without types
        def __init__(self) -> None:
            super().__init__()
            self.add_session_config_entry("session.intra_op.allow_spinning", "0")

    onnxruntime.SessionOptions = SessionOptions
    state.get_default_session_options = SessionOptions  # for sessions without options


_let_idle_threads_sleep()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--library", help="test this build of libflownpu_ep.so rather than the installed one")
    parser.addoption("--build", choices=("RELEASED", "SANITIZED"), help="leave out what only the other build runs")
    parser.addoption("--onnxruntime-headers", help="compare ep/abi.h with the headers in this folder")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Does not import files whose tests only another build runs."""
    build = config.getoption("--build")
    if not build or collection_path == config.rootpath:
        return None
    return builds.has_none(collection_path.relative_to(config.rootpath).as_posix(), builds.Build[build]) or None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what another build runs, and sorts the rest: files that take long come first."""
    if build := config.getoption("--build"):
        items[:] = [item for item in items if builds.Build[build] in builds.build_of(item)]
    items.sort(key=builds.place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, gives each of pytest-xdist's processes a file at a time, or a folder (`builds.scope`)."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByRoom(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return builds.scope(nodeid, super()._split_scope(nodeid))

    return ByRoom(config, log)


def pytest_collection_finish() -> None:
    """Collects cyclic garbage less often: collections took a sixth of the time of tests that record plans."""
    gc.collect()
    gc.freeze()  # modules are never garbage
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(scope="module", autouse=True)
def _only_own_circles() -> None:
    """Excludes objects of earlier test files, such as caches of plans, from garbage collections.

    Otherwise a collection that a test requests took a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator of random numbers that depend on the test's name alone."""
    import numpy as np

    return np.random.default_rng(list(request.node.name.encode()))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Small models for devices by name, each made once."""
    from tests.npu.models import Models  # imports transformers, which processes of tests without models do not need

    return Models(tmp_path_factory.mktemp)


@pytest.fixture(scope="session")
def library(pytestconfig: pytest.Config) -> Path:
    """The execution provider's shared library."""
    if given := pytestconfig.getoption("--library"):
        return Path(given).resolve()
    import flownpu

    return Path(flownpu.get_library_path())


@pytest.fixture(scope="session")
def ep_devices(library: Path) -> list[onnxruntime.OrtEpDevice]:
    """FlowNPU's devices, registered with onnxruntime once for all tests."""
    import onnxruntime

    def ours() -> list[onnxruntime.OrtEpDevice]:
        return [device for device in onnxruntime.get_ep_devices() if device.ep_name == "FlowNPUExecutionProvider"]

    if not ours():
        onnxruntime.register_execution_provider_library("FlowNPUExecutionProvider", str(library))
    return ours()


@pytest.fixture(scope="session")
def genai(library: Path) -> Any:
    """ORT GenAI with FlowNPU registered once for all tests: GenAI would offer a device for each registration."""
    og = pytest.importorskip("onnxruntime_genai", reason="needs the extra genai")
    from flownpu import registration

    if og not in registration._registered_with:
        og.register_execution_provider_library(registration.get_ep_name(), str(library))
        registration._registered_with.add(og)
    return og


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Converts a checkpoint of tests/fixtures/, once for each set of options; tests must only change copies of it.

    All processes of a session share the folders: the first converts, and others wait for it.
    """
    from flownpu.convert import convert

    checkpoints, shared = Path(__file__).parent / "fixtures", _of_session(tmp_path_factory, "converted")

    def folder(checkpoint: str = "gemma3-topics", **options: Any) -> Path:
        key = json.dumps([checkpoint, options], sort_keys=True)
        parent = shared / f"{checkpoint}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
        parent.mkdir(exist_ok=True)
        with (parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Conversion makes the folder under another name, and renames it at its end.
            if not (parent / "model").exists():
                convert(checkpoints / checkpoint, parent / "model", **options)
        return parent / "model"

    return folder


def _of_session(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """A folder of all processes of a session."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def opencl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Sets the environment for OpenCL on the CPU, before the first test: a process loads the OpenCL loader once only.

    All processes of a session share FlowNPU's cache of compiled kernels. Nothing is set if there is no PoCL.
    """
    from tests import pocl as packages

    try:
        variables = packages.variables(_of_session(tmp_path_factory, "opencl"))
    except packages.MissingError as missing:
        yield {"missing": str(missing)}
        return
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield variables


@pytest.fixture(scope="session")
def pocl(opencl: dict[str, str]) -> dict[str, str]:
    """The environment variables by which FlowNPU finds PoCL; skips the test if PoCL is not there."""
    if "missing" in opencl:
        pytest.skip(opencl["missing"])
    return opencl


@pytest.fixture(scope="module")
def lavapipe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Sets the environment for Vulkan on the CPU; skips the test, with the reason, if it is not there."""
    from tests import lavapipe as packages

    folder = tmp_path_factory.getbasetemp() / "lavapipe"
    folder.mkdir(exist_ok=True)
    try:
        variables = packages.variables(folder)
    except packages.MissingError as missing:
        pytest.skip(str(missing))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield variables


@pytest.fixture(scope="module", params=["opencl", "vulkan"])
def gpu_api(request: pytest.FixtureRequest) -> str:
    """Each API of the GPU device in turn, on the CPU."""
    request.getfixturevalue({"opencl": "pocl", "vulkan": "lavapipe"}[request.param])
    return str(request.param)


@pytest.fixture
def double(pocl: dict[str, str]) -> Iterator[Double]:
    """The double of OpenCL's loader, which injects failures; checks that each wait for a hung call had a limit."""
    from tests.loader_double import Double

    del pocl
    double = Double()
    yield double
    waits = double.endless_waits()
    double.reset()
    assert waits == 0


@pytest.fixture
def vulkan_double(lavapipe: dict[str, str]) -> Iterator[Double]:
    """The double of Vulkan's loader."""
    from tests.loader_double import Double

    del lavapipe
    double = Double("vulkan")
    yield double
    double.reset()
