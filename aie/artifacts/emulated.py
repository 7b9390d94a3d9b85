# SPDX-License-Identifier: Apache-2.0
"""A folder of artifacts for the emulator: flat arrays, families of calls, the index and a manifest.

    index.words                  the index (index.py)
    manifest.json                the same for people, with sums and with what each file was made of
    arrays/<array>.words         an array, flat (emulator/flatten.py)
    calls/<array>/<call>.words   a call's words for all positions (programs/call_family.py)

The folder is its own cache: a family whose inputs have not changed is not derived again.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flownpu.aie.artifacts.folder import MANIFEST, digest, write_bytes, write_text
from flownpu.aie.artifacts.index import Index
from flownpu.aie.emulator.flatten import FlatArray, flatten_array
from flownpu.aie.programs.program import calls_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from flownpu.aie.programs.call import ArtifactCall
    from flownpu.aie.programs.program import Program

_FORMAT = "emulated-3"  # the manifest's
_OLDER = ("emulated-1", "emulated-2")  # formats whose folders are replaced without reusing anything


def write_emulated(
    folder: Path,
    target: str,
    programs: Sequence[Program],
    *,
    about: Mapping[str, Any],
    report: Callable[[ArtifactCall], None] = lambda _: None,
) -> int:
    """Writes a folder for the emulator: under another name beside it, and renamed when it is complete.

    Families of an earlier folder whose inputs have not changed are not derived again.

    Args:
        folder: the folder to make, or to bring up to date.
        target: npu1 or npu2.
        programs: all programs that the host is to run.
        about: more entries of the manifest.
        report: called with each call before it is looked at.

    Returns:
        How many calls were derived.

    Raises:
        PlanError: a plan breaks the hardware's limits.
        ValueError: something else is at the folder's path; a call's words follow no rule; or two arrays have one name.
    """
    folder = Path(os.path.abspath(folder))  # noqa: PTH100  (resolve() would follow a link that is the folder itself)
    writer = _EmulatedFolder(folder, target, dict(about))
    folder.parent.mkdir(parents=True, exist_ok=True)
    writer.temporary.mkdir()
    try:
        for call in calls_of(programs):
            report(call)
            writer.add(call)
        writer.finish(programs)
    finally:
        shutil.rmtree(writer.temporary, ignore_errors=True)
    return writer.derived


class _EmulatedFolder:
    """A folder that is being written."""

    def __init__(self, folder: Path, target: str, about: dict[str, Any]) -> None:
        self._folder = folder
        self._old = _records(folder)
        self.temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
        self.derived = 0
        self._about, self._target = about, target
        self._arrays: dict[str, FlatArray] = {}
        self._calls: dict[str, dict[str, Any]] = {}

    def add(self, call: ArtifactCall) -> None:
        plan = call.last_plan
        flat = flatten_array(plan.array)
        if self._arrays.setdefault(call.array, flat).identity != flat.identity:
            raise ValueError(
                f"[artifacts] two arrays that differ are both called {call.array}: {call.name} is of the second"
            )
        words = flat.flatten(plan.sequence)
        inputs = digest(f"{_sources()} {call.positions} {call.moves} {flat.identity} {digest(words.tobytes())}")
        content = self._kept(call.family_file, inputs)
        if content is None:
            self.derived += 1
            family = call.family(lambda position: flat.flatten(call.sequence(position)))
            content = family.flatten(call.name, flat.identity).tobytes()
        write_bytes(self.temporary / _array_file(call.array), flat.words.tobytes())
        write_bytes(self.temporary / call.family_file, content)
        self._calls[call.family_file] = {**call.record(), "inputs": inputs, "sha256": digest(content)}

    def _kept(self, file: str, inputs: str) -> bytes | None:
        """A call's file in the earlier folder, if it was made of these inputs and has not changed since."""
        old, path = self._old.get(file, {}), self._folder / file
        if old.get("inputs") != inputs or not path.is_file():
            return None
        content = path.read_bytes()
        return content if digest(content) == old.get("sha256") else None

    def finish(self, programs: Sequence[Program]) -> None:
        manifest = {
            "format": _FORMAT,
            "target": self._target,
            **self._about,
            "arrays": {
                name: {"file": _array_file(name), "sha256": digest(flat.words.tobytes())}
                for name, flat in self._arrays.items()
            },
            "calls": self._calls,
            "programs": [program.record() for program in programs],
        }
        write_text(self.temporary / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        files = {name: _array_file(name) for name in self._arrays}
        Index(self.temporary, self._target, emulated=True, programs=programs, array_files=files).write()
        if not self._folder.exists():
            self.temporary.rename(self._folder)
            return
        previous = self.temporary.with_suffix(".previous")
        self._folder.rename(previous)
        self.temporary.rename(self._folder)
        shutil.rmtree(previous)


def _array_file(array: str) -> str:
    return f"arrays/{array}.words"


def _records(folder: Path) -> dict[str, Any]:
    """Each call's record in the manifest of an earlier folder; empty if there is none, or of an older format.

    Raises:
        ValueError: the folder is not one that `write_emulated` made.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return {}
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if found["format"] in _OLDER:
            return {}
        if found["format"] == _FORMAT and all(isinstance(call, dict) for call in found["calls"].values()):
            return dict(found["calls"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise ValueError(
        f"[artifacts] expected {folder} to be a folder of artifacts for the emulator, and it is not: choose another, "
        "or remove this one"
    )


@cache
def _sources() -> str:
    """The digest of all Python sources of `flownpu.aie`, which produce plans and words."""
    sums = hashlib.sha256()
    root = Path(__file__).parents[1]
    for file in sorted(root.rglob("*.py")):
        sums.update(f"{file.relative_to(root).as_posix()} {digest(file.read_bytes())}\n".encode())
    return sums.hexdigest()
