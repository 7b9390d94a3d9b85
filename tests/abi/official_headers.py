# SPDX-License-Identifier: Apache-2.0
"""Gets ONNX Runtime's official C headers from Debian, without installing anything.

No package index has the headers, but Debian's libonnxruntime-dev does, in suites newer than the stable ones this
project supports. The source list for such a suite is made from the machine's own: same mirror, same key, another suite.
"""

import shutil
import subprocess
from pathlib import Path

PACKAGE = "libonnxruntime-dev"
# The only suite of Debian whose name never changes its meaning; it has the newest version of the package.
SUITE = "sid"
HEADER = "onnxruntime_c_api.h"


class UnavailableError(Exception):
    """The headers are not available on this machine; the text says why."""


def fetch(folder: Path) -> Path:
    """The folder with the headers, downloaded into `folder` if they are not there yet.

    Raises:
        UnavailableError: this is not a Debian machine, or it has no network.
    """
    if found := _find(folder):
        return found
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise UnavailableError("no apt-get and dpkg-deb: the headers are taken from a Debian package")
    private = folder / "apt"
    for path in ("lists/partial", "cache/archives/partial"):
        (private / path).mkdir(parents=True, exist_ok=True)
    (private / "status").touch()
    (private / "sources.list").write_text(_source_line() + "\n")
    settings = {
        "Dir::Etc::SourceList": private / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": private / "lists",
        "Dir::State::Status": private / "status",
        "Dir::Cache": private / "cache",
        "APT::Sandbox::User": "",
        "Acquire::Languages": "none",
        "Acquire::Retries": "1",
        "Acquire::http::Timeout": "20",
    }
    apt = ["apt-get", *(argument for key, value in settings.items() for argument in ("-o", f"{key}={value}"))]
    _run([*apt, "update"], private)
    _run([*apt, "download", PACKAGE], private)
    for package in private.glob(f"{PACKAGE}_*.deb"):
        _run(["dpkg-deb", "-x", str(package.resolve()), str((folder / "root").resolve())], private)
    if found := _find(folder):
        return found
    raise UnavailableError(f"{PACKAGE} of {SUITE} holds no {HEADER}")


def _find(folder: Path) -> Path | None:
    return next((header.parent for header in (folder / "root").rglob(HEADER)), None)


def _source_line() -> str:
    """The machine's own Debian source with another suite, as a line of a source list."""
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    codename = release.get("VERSION_CODENAME", "").strip('"')
    if release.get("ID") != "debian" or not codename:
        raise UnavailableError(f"this is no Debian release but {release.get('ID')}: the headers are taken from Debian")
    etc = Path("/etc/apt")
    for file in sorted(etc.glob("sources.list.d/*.sources")):
        for stanza in file.read_text().split("\n\n"):
            lines = (line for line in stanza.splitlines() if ":" in line and not line.startswith("#"))
            fields = {key.strip(): value.strip() for key, value in (line.split(":", 1) for line in lines)}
            if codename in fields.get("Suites", "").split() and "main" in fields.get("Components", "").split():
                key = f" [signed-by={fields['Signed-By']}]" if fields.get("Signed-By", "").startswith("/") else ""
                return f"deb{key} {fields['URIs'].split()[0]} {SUITE} main"
    for file in (etc / "sources.list", *sorted(etc.glob("sources.list.d/*.list"))):
        for line in file.read_text().splitlines() if file.is_file() else ():
            words = line.split()
            if words[:1] == ["deb"] and codename in words and "main" in words:
                return " ".join([*words[: words.index(codename)], SUITE, "main"])
    raise UnavailableError(f"apt has no source for {codename} main to derive that of {SUITE} from")


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise UnavailableError(f"{command[0]} {command[-1]} failed: {reason[-1] if reason else done.returncode}")
