# SPDX-License-Identifier: Apache-2.0
"""The folder of models that were pulled by name: each is there as a whole, or not at all."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

import flownpu.convert
from flownpu.convert.progress import ProgressCallback
from flownpu.errors import FlowNPUError, require
from flownpu.hub.reference import Reference, Source, hint, parse, short_names
from flownpu.model.folder import MANIFEST, read_json


@dataclass(frozen=True)
class StoredModel:
    """A model that was pulled."""

    name: str
    """The name by which it was pulled; a repository in place of a short name."""
    short_names: list[str]
    source: str
    """The repository with its commit, as the manifest has it."""
    size: int
    """Bytes of the folder's files."""
    folder: Path


def cache_folder() -> Path:
    """`flownpu` in $XDG_CACHE_HOME, or in ~/.cache."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    base = Path(given) if given and Path(given).is_absolute() else Path.home() / ".cache"
    return base / "flownpu"


def models_folder() -> Path:
    """The folder of all models."""
    return cache_folder() / "models"


def folder_of(reference: Reference) -> Path:
    """The folder that a model has, or would have: "google--gemma-3-1b-it"."""
    return models_folder() / quote(str(reference).replace("/", "--", 1), safe="@")


def stored_models() -> list[StoredModel]:
    """All models that are complete, by name."""
    found = []
    for manifest in sorted(models_folder().glob(f"[!.]*/{MANIFEST}")):
        folder = manifest.parent
        name = unquote(folder.name).replace("--", "/", 1)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        reference = parse(name)
        shorts = short_names(reference) if reference else []
        found.append(StoredModel(name, shorts, read_json(manifest).get("source", {}).get("name", ""), size, folder))
    return found


def unfinished_pulls() -> list[str]:
    """The names of models whose download or conversion began and has not ended, whether it broke off or goes on."""
    try:
        from huggingface_hub import constants  # noqa: PLC0415 without the extra `convert` nothing was downloaded
    except ModuleNotFoundError:
        return []
    found = []
    for lock in sorted((models_folder() / ".locks").glob("*.lock")):
        reference = parse(unquote(lock.stem).replace("--", "/", 1))
        if reference is None or folder_of(reference).is_dir():
            continue
        downloads = Path(constants.HF_HUB_CACHE, f"models--{reference.repository.replace('/', '--')}", "blobs")
        if any(downloads.glob("*.incomplete")) or any(models_folder().glob(f".{lock.stem}.*.partial")):
            found.append(str(reference))
    return found


def locate(path: Path) -> Path | Reference:
    """Says whether a command's argument is a path or a name.

    A path that exists is no name. Nor is one in a folder that exists, unless a model of this name was pulled.

    Raises:
        FlowNPUError: it is neither, and nearly a short name.
    """
    text = path.as_posix()
    if path.exists():
        return path
    reference = parse(text)
    if reference is None:
        if "/" not in text and (near := hint(text)):
            raise FlowNPUError(f"{text}: no such folder, and no such name{near}")
        return path
    in_a_folder = "/" in text and path.parent.is_dir()
    return path if in_a_folder and not folder_of(reference).is_dir() else reference


def find_model(path: Path, report: ProgressCallback, say: Callable[[str], None]) -> Path:
    """The folder that a command's argument means: that of a path, or of a name, which is pulled if it was not before.

    Raises:
        FlowNPUError: a model cannot be pulled, or the argument is nearly a short name.
    """
    place = locate(path)
    return pull(place, report, say, renew=False) if isinstance(place, Reference) else place


def find_source(path: Path, output: Path | None, report: ProgressCallback) -> Source:
    """The checkpoint or file that a command's argument means: that of a path, or of a name, which is downloaded.

    Args:
        path: the argument.
        output: the folder that is to be made of it, whose disk must have the room; None: there is none.
        report: called with a `Progress` whenever a part is done.

    Raises:
        FlowNPUError: it cannot be downloaded, or the argument is nearly a short name.
    """
    place = locate(path)
    return _fetch(place, output, report) if isinstance(place, Reference) else Source(place, place.resolve().name)


def pull(reference: Reference, report: ProgressCallback, say: Callable[[str], None], *, renew: bool = True) -> Path:
    """Downloads a model and converts it, unless that was done before.

    Args:
        reference: the model.
        report: called with a `Progress` whenever a part is done.
        say: called with a line if another process works on the same model, for which this one waits.
        renew: ask the hub whether a model that is there is the newest, and make it again if not.

    Returns:
        The model's folder.

    Raises:
        FlowNPUError: the model cannot be downloaded or converted; what was there before stays.
    """
    folder = folder_of(reference)
    if folder.is_dir() and not renew:
        return folder
    with _locked(folder, say):
        if folder.is_dir() and not renew:  # another process has made it
            return folder
        source = _fetch(reference, folder, report)
        if folder.is_dir() and read_json(folder / MANIFEST)["source"]["name"] == source.name:
            return folder
        flownpu.convert.convert(source.path, folder, name=source.name, force=True, progress=report)
    return folder


def _fetch(reference: Reference, output: Path | None, report: ProgressCallback) -> Source:
    """Downloads what a conversion of a model reads.

    Raises:
        MissingDependencyError: huggingface_hub is not installed.
        FlowNPUError: the model cannot be downloaded.
    """
    hub = require("flownpu.hub.download", extra="convert", purpose=f"The download of {reference}")
    source: Source = hub.download(reference, output, report)
    return source


def remove(reference: Reference) -> None:
    """Removes a model, whose download stays in huggingface_hub's cache.

    Raises:
        FlowNPUError: there is no such model.
    """
    folder = folder_of(reference)
    if not folder.is_dir():
        there = ", ".join(model.name for model in stored_models()) or "none"
        raise FlowNPUError(f"{reference} was not pulled; these models were: {there}")
    with _locked(folder, lambda _: None):
        # It disappears at once; if its files are not removed, because this is interrupted, the next removal does it.
        hidden = folder.with_name(f".{folder.name}.removed")
        shutil.rmtree(hidden, ignore_errors=True)
        folder.rename(hidden)
        shutil.rmtree(hidden)


@contextmanager
def _locked(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Waits until no other process works on the folder of a model."""
    filelock = require("filelock", extra="convert", purpose="A model's name")
    locks = models_folder() / ".locks"
    try:
        locks.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FlowNPUError(
            f"{locks.parent} cannot be made ({error}): choose another folder by XDG_CACHE_HOME"
        ) from error
    lock = filelock.FileLock(locks / f"{folder.name}.lock")
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        say(f"waiting for another process, which works on {folder.name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
