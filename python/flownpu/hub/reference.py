# SPDX-License-Identifier: Apache-2.0
"""Reads the name of a model: a short name, or a repository with its revision and its GGUF file."""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from flownpu.errors import FlowNPUError
from flownpu.hub.short_names import SHORT_NAMES

# ORGANISATION/MODEL@REVISION:GGUF, and the hub's own address in front of it, with which Ollama names repositories.
_NAME = re.compile(
    r"(?:(?:https://)?(?:hf\.co|huggingface\.co)/)?"
    r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[^\s:]+))?(?::(?P<gguf>[\w.-]+))?",
    re.ASCII,
)


@dataclass(frozen=True)
class Reference:
    """A model of the hub."""

    repository: str
    """Its organisation and its name: "google/gemma-3-1b-it"."""
    revision: str = ""
    """A branch, a tag or a commit; empty: the repository's main branch."""
    gguf: str = ""
    """The type of a GGUF file's weights, such as "Q4_K_M", or the file's name; empty: see `needed_files`."""

    def __str__(self) -> str:
        revision, gguf = (mark + part if part else "" for mark, part in (("@", self.revision), (":", self.gguf)))
        return self.repository + revision + gguf


@dataclass(frozen=True)
class Source:
    """The input of a conversion."""

    path: Path
    """A folder or a GGUF file."""
    name: str
    """The name that the model's manifest gives it."""


def parse(name: str) -> Reference | None:
    """The model that a name means; None: it has not the form of a name."""
    if repository := SHORT_NAMES.get(name.lower().removesuffix(":latest")):
        return Reference(repository)
    found = _NAME.fullmatch(name)
    # The hub's names have neither of these; folders of models are named after that (`store.folder_of`).
    if found is None or re.search(r"--|\.\.", found["repository"]):
        return None
    return Reference(**{part: text or "" for part, text in found.groupdict().items()})


def expect(name: str) -> Reference:
    """As `parse`, but raises FlowNPUError, with the names that are nearest, if the text is no name."""
    reference = parse(name)
    if reference is None:
        raise FlowNPUError(
            f"expected a short name, or a repository as in ORGANISATION/MODEL@REVISION:GGUF, got {name!r}{hint(name)}"
        )
    return reference


def hint(name: str) -> str:
    """The end of an error's sentence: the short names that are most like this one."""
    name = name.rpartition("/")[2].lower()
    same = [short for short in SHORT_NAMES if short.partition(":")[0] == name.partition(":")[0]]
    near = same or difflib.get_close_matches(name, SHORT_NAMES, n=4, cutoff=0.6)
    return f". Is it one of {', '.join(near)}?" if near else ""


def short_names(reference: Reference) -> list[str]:
    """The short names that mean the same."""
    return [name for name, repository in SHORT_NAMES.items() if Reference(repository) == reference]
