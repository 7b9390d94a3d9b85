# SPDX-License-Identifier: Apache-2.0
"""Writes flownpu_manifest.json: the source and settings of a conversion, and the checksums of its files."""

import json
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flownpu.convert.progress import ProgressCallback, Stage
from flownpu.model.folder import MANIFEST
from flownpu.model.integrity import sha256, tensor_sums

# Version of the manifest's own format.
FORMAT = 1


def rounded(errors: Mapping[str, float]) -> dict[str, float]:
    """Relative errors, rounded as the manifest has them."""
    return {name: round(error, 6) for name, error in errors.items()}


def write_manifest(
    folder: Path,
    *,
    source: Mapping[str, Any],
    settings: Mapping[str, Any],
    quantisation: Mapping[str, Any],
    packages: Iterable[str],
    progress: ProgressCallback,
    read: Mapping[str, Path] = MappingProxyType({}),
) -> None:
    """Writes the manifest of a folder that is otherwise complete.

    Args:
        folder: the model's folder.
        source: the origin of the model, except its files.
        settings: the conversion's options.
        quantisation: the format of the weights and the error of each.
        packages: distributions whose versions are recorded.
        progress: called with a `Progress` after each piece of a file whose checksum is computed.
        read: the source's files by the names that the manifest gives them; none: it has no entry for them.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    advance = Stage(progress, "sum", sum(path.stat().st_size for path in [*files, *read.values()]), "B").advance
    sums = {name: {"sha256": sha256(path, advance)} for name, path in read.items()}
    manifest = {
        "format": FORMAT,
        "source": {**source, **({"files": sums} if read else {})},
        "settings": dict(settings),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in sorted(packages)}},
        "files": {
            path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path, advance)}
            for path in files
        },
        "tensors": tensor_sums(folder),
        "quantisation": dict(quantisation),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
