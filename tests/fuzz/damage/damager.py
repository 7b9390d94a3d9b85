# SPDX-License-Identifier: Apache-2.0
"""Damaged files of every kind that FlowNPU reads: each must be read, or refused by an error that names the file.

A case takes a sample (samples.py), damages one of its files (formats.py), and has it read in a worker
(readers.py). A crash, a hang, too much memory, an error of another type, and a refusal that does not name the
file are findings. Earlier findings are files of corpus/damage/, named "<kind>--<what is wrong>--<file>".
"""

from __future__ import annotations

import gzip
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from tests.fuzz.damage.formats import damaged_file
from tests.fuzz.oracle import Finding, Verdict
from tests.fuzz.worker import Ended, Raised, Worker

READ = "tests.fuzz.damage.readers:read"
CORPUS = Path(__file__).parents[1] / "corpus" / "damage"


@dataclass(frozen=True)
class Kind:
    """A kind of damage.

    Attributes:
        sample: name of the sample whose files are damaged.
        reader: name of the reader that reads them.
        files: patterns of the files that are damaged.
        share: share of the cases, relative to other kinds.
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
    "images": Kind("images", "images", ("*",), 2),
}


class Sample:
    """A sample's folder and the contents of its files."""

    def __init__(self, name: str, folder: Path, worker: Worker) -> None:
        worker.call("tests.fuzz.damage.samples:make", name, str(folder))
        self.folder = folder
        self.contents = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}

    def matching(self, patterns: tuple[str, ...]) -> list[str]:
        """The files that match any of these patterns."""
        return [name for name in self.contents if any(fnmatch(name, pattern) for pattern in patterns)]

    @contextmanager
    def replaced(self, file: str, content: bytes) -> Iterator[None]:
        """Replaces the content of a file while the context lasts."""
        try:
            self._write(file, content)
            yield
        finally:
            self._write(file, self.contents[file])

    def _write(self, name: str, content: bytes) -> None:
        # Written as a new file, because a file that is mapped must not become shorter.
        path = self.folder / name
        path.unlink(missing_ok=True)
        path.write_bytes(content)


@dataclass(frozen=True, repr=False)
class Damage:
    """A case: a file of a kind's sample, its damaged content, and a description of the damage."""

    kind: str
    file: str
    content: bytes
    said: str

    def __repr__(self) -> str:
        return f"{self.kind}, {self.file}: {self.said}"


class Damager:
    """Makes samples and cases from them, and judges how a worker reads these; a context manager."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._samples: dict[str, Sample] = {}

    def __enter__(self) -> Damager:
        self._scratch = tempfile.TemporaryDirectory(prefix="flownpu-damage-")
        return self

    def __exit__(self, *_: object) -> None:
        self._scratch.cleanup()

    def sample(self, kind: str) -> Sample:
        """The sample of a kind, made when it is first asked for."""
        name = KINDS[kind].sample
        if name not in self._samples:
            self._samples[name] = Sample(name, Path(self._scratch.name) / name, self._worker)
        return self._samples[name]

    def cases(self, kinds: list[str] | None = None) -> SearchStrategy[Damage]:
        """Damaged files of some kinds, or of all (None), in proportion to their shares."""

        @st.composite
        def damages(draw: DrawFn) -> Damage:
            kind = draw(st.sampled_from([kind for kind in kinds or KINDS for _ in range(KINDS[kind].share)]))
            sample = self.sample(kind)
            file = draw(st.sampled_from(sample.matching(KINDS[kind].files)))
            return Damage(kind, file, *draw(damaged_file(file, sample.contents[file])))

        return damages()

    def read(self, kind: str) -> list[str]:
        """Has a kind's reader read its sample as it is now; returns its refusals."""
        refusals: list[str] = self._worker.call(READ, KINDS[kind].reader, str(self.sample(kind).folder))
        return refusals

    def judge(self, damage: Damage) -> Verdict:
        """Has a damaged file read, and judges the result."""
        sample = self.sample(damage.kind)
        with sample.replaced(damage.file, damage.content):
            try:
                refusals = self.read(damage.kind)
            except Raised as error:
                return Verdict("raised", Finding(_signature(damage, error.trace), f"{damage!r}\n\n{error.trace}"))
            except Ended as error:
                return Verdict("ended", Finding(_signature(damage, str(error)), f"{damage!r}\n\n{error}"))
        unnamed = [text for text in refusals if not _names(text, damage, sample)]
        if unnamed:
            text = f"{damage.kind}: refused without a name: " + re.sub(r"[0-9]+", "N", unnamed[0])[:160]
            return Verdict("unnamed", Finding(text, f"{damage!r}\n\n{unnamed[0]}"))
        return Verdict("refused" if refusals else "read")


def _names(refusal: str, damage: Damage, sample: Sample) -> bool:
    """Whether a refusal names the file, or at least the folder. The error of a full disk need not name a file."""
    return Path(damage.file).name in refusal or str(sample.folder) in refusal or "make room" in refusal


def _signature(damage: Damage, report: str) -> str:
    """A signature from the kind, what happened and where; findings with the same one probably have the same cause."""
    lines = report.strip().splitlines()
    sanitizer = [line for line in lines if "runtime error:" in line or line.startswith("SUMMARY:")]
    places = [line.strip() for line in lines if re.match(r' *File ".*(flownpu|aie|ops|graph_rewrites)/', line)]
    places = [place for place in places if "/tests/" not in place]
    what = re.sub(
        r"0x[0-9a-f]+|[0-9]{3,}", "N", (sanitizer or lines)[-1 if not sanitizer and "Traceback" in report else 0]
    )
    return f"{damage.kind}: {what[:160]} {places[-1] if places else ''}"


def corpus() -> list[Damage]:
    """The saved cases."""
    return [load(path) for path in sorted(CORPUS.iterdir())]


def save_finding(damage: Damage, finding: Finding, folder: Path) -> Path:
    """Writes a finding's file, and its description beside it; returns the path of the damaged file."""
    path = save(damage, finding.signature.partition(": ")[2], folder)
    path.with_name(path.name + ".txt").write_text(f"{finding.signature}\n\n{finding.text}\n")
    return path


def load(path: Path) -> Damage:
    """Reads a saved case."""
    kind, said, file = path.name.removesuffix(".gz").split("--")
    content = path.read_bytes()
    content = gzip.decompress(content) if path.suffix == ".gz" else content
    return Damage(kind, file.replace("+", "/"), content, said.replace("-", " "))


def save(damage: Damage, said: str, folder: Path = CORPUS) -> Path:
    """Writes a case as a file of the corpus, compressed if it is larger than 4 KB; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    words = "-".join(re.findall(r"[A-Za-z0-9.]+", said))[:80].strip("-.").lower()
    large = len(damage.content) > 4096
    path = folder / f"{damage.kind}--{words}--{damage.file.replace('/', '+')}{'.gz' * large}"
    path.write_bytes(gzip.compress(damage.content, mtime=0) if large else damage.content)
    return path
