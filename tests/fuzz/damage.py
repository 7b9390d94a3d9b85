# SPDX-License-Identifier: Apache-2.0
"""Damaged files of every kind that FlowNPU reads: refused in words that name the file, or read; never anything else.

A case takes a sample (damage_samples.py), damages one of its files (damage_formats.py), and has it read in a worker
(damage_readers.py). A crash, a hang, too much memory, an error of another type, and a refusal that does not name the
file are findings. Files that were found lie in corpus/damage/, as "<kind>--<what is wrong>--<file>", and are read first.
"""

from __future__ import annotations

import gzip
import tempfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity
from hypothesis import strategies as st

from tests.fuzz.damage_formats import damaged_file, seal_words
from tests.fuzz.worker import Raised, Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hypothesis.strategies import DrawFn

CORPUS = Path(__file__).parent / "corpus" / "damage"
# The largest sample is converted and read in half a second, under the sanitizers in five.
SECONDS = 60.0


@dataclass(frozen=True)
class Kind:
    """A kind of damage.

    Attributes:
        sample: whose files.
        reader: what reads them.
        files: patterns of those that are damaged.
        share: of the cases, relative to others.
    """

    sample: str
    reader: str
    files: tuple[str, ...]
    share: int = 1


_CHECKPOINT = ("config.json", "generation_config.json", "*.safetensors")
KINDS = {
    "llama": Kind("llama", "source", _CHECKPOINT, 2),
    "gemma3": Kind("gemma3", "source", _CHECKPOINT, 2),
    "qwen3": Kind("qwen3", "source", _CHECKPOINT),
    "sharded": Kind("sharded", "source", ("*.index.json", "*.safetensors")),
    "awq": Kind("awq", "source", _CHECKPOINT),
    "gptq": Kind("gptq", "source", _CHECKPOINT),
    "pictures": Kind("pictures", "source", (*_CHECKPOINT, "preprocessor_config.json")),
    "gguf-llama": Kind("gguf-llama", "source", ("*.gguf",), 2),
    "gguf-gemma3": Kind("gguf-gemma3", "source", ("*.gguf",), 2),
    "gguf-qwen3": Kind("gguf-qwen3", "source", ("*.gguf",)),
    "genai": Kind("genai", "genai", ("*.json", "*.onnx", "*.data"), 2),
    "optimum": Kind("optimum", "source", ("*.json", "*.onnx", "*.data")),
    "converted": Kind("converted", "converted", ("genai_config.json", "flownpu_manifest.json", "*.onnx", "*.data"), 2),
    "converted-pictures": Kind("converted-pictures", "pictures", ("*.json", "vision.onnx")),
    "explained": Kind("converted", "explained", ("genai_config.json",)),
    "external": Kind("converted", "decoder", ("*.onnx.data",)),
    "q4nx": Kind("q4nx", "q4nx", ("*.q4nx",), 2),
    "compiled": Kind("compiled", "compiled", ("*.flownpu",), 4),
    "compiled-decoder": Kind("compiled-decoder", "decoder", ("*.flownpu",), 4),
    "compiled-emulated": Kind("compiled-emulated", "emulated", ("*.flownpu",), 2),
    "artifacts": Kind("artifacts", "emulated", ("artifacts/*.words",), 4),
    "built": Kind("built", "built", ("artifacts/*/manifest.json",)),
    "plan": Kind("plan", "plan", ("plan.json",), 2),
    "images": Kind("images", "images", ("*",), 2),
}


class Sample:
    """A sample's folder and what its files hold."""

    def __init__(self, name: str, folder: Path, worker: Worker) -> None:
        worker.call("tests.fuzz.damage_samples:make", name, str(folder))
        self.folder = folder
        self.contents = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}

    def matching(self, patterns: tuple[str, ...]) -> list[str]:
        """The files of these patterns."""
        return [name for name in self.contents if any(fnmatch(name, pattern) for pattern in patterns)]

    @contextmanager
    def replaced(self, files: dict[str, bytes]) -> Iterator[None]:
        """The folder with these files in the place of its own."""
        try:
            for name, content in files.items():
                self._write(name, content)
            yield
        finally:
            for name in files:
                self._write(name, self.contents[name])

    def _write(self, name: str, content: bytes) -> None:
        # A new file: one that is mapped must not become shorter.
        path = self.folder / name
        path.unlink(missing_ok=True)
        path.write_bytes(content)


@dataclass(frozen=True)
class Damage:
    """A case: the files that take the places of a sample's, the one that was damaged first, and what was done to it."""

    kind: str
    files: dict[str, bytes]
    said: str

    def __repr__(self) -> str:
        return f"{self.kind}, {next(iter(self.files))}: {self.said}"


class Finding(AssertionError):
    """A damaged file did what it must not."""


class Damager:
    """Samples, and the worker that reads them; a context manager."""

    def __init__(self, library: Path | None = None, *, sanitize: bool = False, seconds: float = SECONDS) -> None:
        self.worker = Worker(library, sanitize=sanitize, seconds=seconds)
        self._samples: dict[str, Sample] = {}

    def __enter__(self) -> Damager:
        self.worker.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.worker.__exit__(*exception)
        self._scratch.cleanup()

    @cached_property
    def _scratch(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="flownpu-damage-")

    def sample(self, kind: str) -> Sample:
        """The sample of a kind, made when it is first asked for."""
        name = KINDS[kind].sample
        if name not in self._samples:
            self._samples[name] = Sample(name, Path(self._scratch.name) / name, self.worker)
        return self._samples[name]

    def check(self, damage: Damage) -> bool:
        """Whether the damaged file is refused.

        Raises:
            Finding: in words that do not name it, by an error of another type, or not at all, for the process ended.
        """
        sample = self.sample(damage.kind)
        with sample.replaced(damage.files):
            try:
                refusals = self.worker.call(
                    "tests.fuzz.damage_readers:read", KINDS[damage.kind].reader, str(sample.folder)
                )
            except Raised as error:
                raise Finding(f"{damage!r}\n{error.trace}") from None
            except Exception as error:
                raise Finding(f"{damage!r}\n{error}") from None
        name = Path(next(iter(damage.files))).name
        for refusal in refusals:
            if name not in refusal and str(sample.folder) not in refusal:
                raise Finding(f"{damage!r}\nwas refused without its name: {refusal}")
        return bool(refusals)

    @st.composite
    @staticmethod
    def damages(draw: DrawFn, self: Damager, kinds: list[str]) -> Damage:
        """A strategy of cases."""
        kind = draw(st.sampled_from([kind for kind in kinds for _ in range(KINDS[kind].share)]))
        sample = self.sample(kind)
        file = draw(st.sampled_from(sample.matching(KINDS[kind].files)))
        content, said = draw(damaged_file(file, sample.contents[file]))
        files = {file: content}
        if kind == "artifacts" and file.endswith(".words") and draw(st.integers(0, 3)) > 0:
            files |= _with_index(sample, file, content)
            said += ", its sum in the index"
        return Damage(kind, files, said)


def _with_index(sample: Sample, file: str, content: bytes) -> dict[str, bytes]:
    """The index of a folder of artifacts that has the sum of a damaged file."""
    (name,) = sample.matching(("*/index.words",))
    if file == name:
        return {}
    old, new = (zlib.crc32(data).to_bytes(8, "little") for data in (sample.contents[file], content))
    index = sample.contents[name].replace(old, new)
    return {name: seal_words(index)}


def corpus() -> list[Damage]:
    """The files that were found."""
    found = []
    for path in sorted(CORPUS.iterdir()):
        kind, said, file = path.name.removesuffix(".gz").split("--")
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        found.append(Damage(kind, {file.replace("+", "/"): content}, said.replace("-", " ")))
    return found


def keep(damage: Damage, said: str) -> Path:
    """Puts a case into the corpus."""
    file, content = next(iter(damage.files.items()))
    name = f"{damage.kind}--{said.replace(' ', '-')}--{file.replace('/', '+')}"
    compressed = gzip.compress(content, mtime=0)
    path = CORPUS / (name if len(content) < 4096 else f"{name}.gz")
    path.write_bytes(content if len(content) < 4096 else compressed)
    return path


def run(
    cases: int,
    seed: int,
    *,
    kinds: list[str] | None = None,
    library: Path | None = None,
    sanitize: bool = False,
    verbose: bool = False,
) -> dict[str, int]:
    """Reads the corpus, then so many cases of a seed; how many files were refused, and how many read.

    Raises:
        Finding: the smallest case that hypothesis could make of the first finding.
    """
    counts = {"refused": 0, "read": 0}
    with Damager(library, sanitize=sanitize) as damager:
        chosen = kinds or list(KINDS)

        def count(damage: Damage) -> None:
            counts["refused" if damager.check(damage) else "read"] += 1

        for damage in corpus():
            if damage.kind in chosen:
                count(damage)

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=cases,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.verbose if verbose else Verbosity.normal,
            print_blob=False,
        )
        @hypothesis.given(Damager.damages(damager, chosen))
        def every(damage: Damage) -> None:
            count(damage)

        every()
    return counts


__all__: list[Any] = ["KINDS", "Damage", "Damager", "Finding", "corpus", "keep", "run"]
