# SPDX-License-Identifier: Apache-2.0
"""Downloads what a conversion reads by huggingface_hub: into its cache, with its tokens, mirrors and offline mode."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import filelock
from httpx2 import TransportError
from huggingface_hub import (
    HfApi,
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]
from huggingface_hub.utils.tqdm import tqdm

from flownpu.convert.encoder.families import is_text_encoder
from flownpu.convert.families import read_decoder
from flownpu.convert.progress import ProgressCallback, Stage
from flownpu.errors import FlowNPUError
from flownpu.hub.failures import FAILURES, explain
from flownpu.hub.needed_files import is_checkpoint, needed_files
from flownpu.hub.reference import Reference, Source
from flownpu.model.folder import MODULES, read_json
from flownpu.model.integrity import sha256

# It prints its warnings itself, and also passes them on to whoever prints those of all modules.
logging.getLogger("huggingface_hub").handlers.clear()

_UNREACHABLE = (OfflineModeIsEnabled, TransportError)


@dataclass(frozen=True)
class _File:
    size: int
    sha256: str | None
    """None: the hub gives none, because the file is small and part of the repository itself, or cannot be asked."""


def download(reference: Reference, output: Path | None, report: ProgressCallback) -> Source:
    """Downloads the files that are not in huggingface_hub's cache, and compares all with the hub's checksums.

    Args:
        reference: the model.
        output: the folder that will be made of them, whose disk must have the room; None: there is none.
        report: called with a `Progress` whenever a part is done.

    Raises:
        FlowNPUError: the hub has no such model, does not give it, cannot be reached, or the disk is too small.
        ConversionError: a checkpoint is of a family that cannot be converted; its weights are not downloaded.
    """
    try:
        return _download(reference, output, report)
    except FAILURES as error:
        raise explain(error, reference) from error


def _download(reference: Reference, output: Path | None, report: ProgressCallback) -> Source:
    repository, api = reference.repository, HfApi()
    commit = api.resolve_revision(repository, revision=reference.revision or None).resolved
    files, names = _files(api, reference, commit)
    cached = [name for name in names if isinstance(try_to_load_from_cache(repository, name, revision=commit), str)]
    missing = [name for name in names if name not in cached]
    bar = None
    if missing:
        new = sum(files[name].size for name in missing)
        there = sum(_downloaded(repository, files[name]) for name in missing)
        _check_room(reference, new - there, output, sum(files[name].size for name in names))
        bar = _bar(Stage(report, "download", new, "B").advance)
    paths: dict[str, Path] = {}
    # One after the other in this thread: Ctrl-C would not end a thread that downloads. Weights come last.
    for name in sorted(names, key=lambda name: files[name].size):
        if name in missing:
            _complete(repository, name, commit, files[name], bar)
        paths[name] = Path(hf_hub_download(repository, name, revision=commit, tqdm_class=bar))
        if name == "config.json" and is_checkpoint(names):
            _check_family(reference, paths[name], embeds=MODULES in names)
    _check_sums(reference, {path: files[name] for name, path in paths.items()}, report)
    first, path = next(iter(paths.items()))
    if first.endswith(".gguf"):
        return Source(path, f"{repository}@{commit}:{first}")
    return Source(path.parents[first.count("/")], f"{repository}@{commit}")


def _part(repository: str, file: _File) -> Path:
    """Where the part of a file is kept until it is whole: beside huggingface_hub's whole files, named by SHA-256."""
    folder = f"models--{repository.replace('/', '--')}"
    return Path(constants.HF_HUB_CACHE, folder, "blobs", f"{file.sha256}.incomplete")


def _downloaded(repository: str, file: _File) -> int:
    """The bytes of a file that an ended process left."""
    part = _part(repository, file)
    return part.stat().st_size if file.sha256 and part.is_file() else 0


def _complete(repository: str, name: str, commit: str, file: _File, bar: type[tqdm] | None) -> None:
    """Downloads a large file to where hf_hub_download looks for it, from where the last process ended.

    hf_hub_download would begin it again. It downloads those of which the hub gives no SHA-256, which are small, and
    those that the hub does not give by HTTP.
    """
    part = _part(repository, file)
    if file.sha256 is None or file.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
        return
    about = get_hf_file_metadata(hf_hub_url(repository, name, revision=commit))
    headers = build_hf_headers()
    if urlsplit(about.location).netloc != urlsplit(constants.ENDPOINT).netloc:
        # The address has a signature of its own, and the user's token is not for other hosts.
        headers.pop("authorization", None)
    folder = part.parents[1].name
    lock = Path(constants.HF_HUB_CACHE, ".locks", folder, f"{file.sha256}.lock")
    for needed in (lock, part):
        needed.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(lock):
        if part.with_suffix("").exists():
            return
        with part.open("ab") as stream:
            http_get(
                about.location,
                stream,
                resume_size=stream.tell(),
                headers=headers,
                expected_size=file.size,
                tqdm_class=bar,
            )
        part.replace(part.with_suffix(""))


def _check_family(reference: Reference, path: Path, *, embeds: bool) -> None:
    """Raises ConversionError if a checkpoint's config.json is of a model that cannot be converted."""
    config = read_json(path)
    if not is_text_encoder(config):
        read_decoder(config, where=f"{reference}: config.json", embeds=embeds)


def _files(api: HfApi, reference: Reference, commit: str) -> tuple[dict[str, _File], list[str]]:
    """The files of a commit by path, and the names of those that are needed.

    Where the hub cannot be reached, they are those in the cache; its error is raised if these are not enough.
    """
    repository = reference.repository
    try:
        tree = api.list_repo_tree(repository, revision=commit, recursive=True)
        files = {
            file.path: _File(file.size, file.lfs.sha256 if file.lfs else None)
            for file in tree
            if isinstance(file, RepoFile)
        }
    except _UNREACHABLE as error:
        # Without patterns, the folder would be refused unless it had all files of the repository.
        folder = Path(snapshot_download(repository, revision=commit, local_files_only=True, allow_patterns=[]))
        paths = [path for path in folder.rglob("*") if path.is_file()]
        files = {path.relative_to(folder).as_posix(): _File(path.stat().st_size, None) for path in paths}
        try:
            return files, needed_files(files, reference)
        except FlowNPUError:
            raise error from None
    return files, needed_files(files, reference)


def _bar(advance: Callable[[int], None]) -> type[tqdm]:
    """A class of progress bars for huggingface_hub, which display nothing and count the bytes of files."""

    class Bar(tqdm):
        def __init__(self, *arguments: Any, name: str | None = None, **settings: Any) -> None:
            super().__init__(*arguments, **{**settings, "disable": True})  # type: ignore[no-untyped-call]
            advance(int(settings.get("initial") or 0))
            # A file that comes in pieces has a second bar, which counts the compressed bytes of the network.
            self._counts = not (name or "").endswith(".transfer")

        def update(self, n: float | None = 1) -> None:
            if self._counts:
                advance(int(n or 0))

    return Bar


def _check_room(reference: Reference, new: int, output: Path | None, size: int) -> None:
    """Raises FlowNPUError if a disk lacks the room for `new` bytes to download, or for the output made of `size` bytes.

    Weights of 16 bits become Q4NX of 5; a conversion of others checks its room itself, before it writes.
    """
    places = [(Path(constants.HF_HUB_CACHE), new)] + ([(output.absolute(), size * 5 // 16)] if output else [])
    needs: dict[int, int] = {}
    for place, count in places:
        folder = next(parent for parent in (place, *place.parents) if parent.is_dir())
        disk = folder.stat().st_dev
        needs[disk] = needs.get(disk, 0) + count
        free = shutil.disk_usage(folder).free
        if free < needs[disk]:
            raise FlowNPUError(
                f"{reference} takes about {needs[disk] / 1e6:.0f} MB on the disk of {folder}, which has "
                f"{free / 1e6:.0f} MB free: make room, or choose other disks by HF_HOME (downloads) and "
                "XDG_CACHE_HOME (models)"
            )


def _check_sums(reference: Reference, files: dict[Path, _File], report: ProgressCallback) -> None:
    """Raises FlowNPUError if a file is not the hub's, and removes it from the cache."""
    summed = {path: file for path, file in files.items() if file.sha256 is not None}
    stage = Stage(report, "compare", sum(file.size for file in summed.values()), "B")
    for path, file in summed.items():
        if (found := sha256(path, stage.advance)) != file.sha256:
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            raise FlowNPUError(
                f"{reference}: {path.name} was damaged on its way or on this disk (SHA-256 {found}, expected "
                f"{file.sha256}), and is removed: run the command again"
            )
