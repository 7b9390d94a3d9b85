# SPDX-License-Identifier: Apache-2.0
"""Gets packages of Debian or Ubuntu without root: apt downloads them into a folder that `tools.py` chooses."""

import os
import re
import shutil
import subprocess
from pathlib import Path

SECONDS = 600
# Folders of apt's state, which are not needed once the packages are unpacked.
STATE = ("cache", "lists", "packages")


class UnavailableError(RuntimeError):
    """A package is not available; the message says why."""


class Apt:
    """apt with its lists and archives in a folder, which is emptied first.

    Args:
        folder: `root/` in it gets the packages' files.
        what: name of what is wanted, for messages: "mlir-opt".
        architecture: Debian's name of the packages' architecture: "arm64"; empty for the machine's.

    Raises:
        UnavailableError: this machine has none of apt's programs.
    """

    def __init__(self, folder: Path, what: str, architecture: str = "") -> None:
        self.folder, self.what = folder, what
        for tool in ("apt-get", "apt-cache", "dpkg-deb", "dpkg-query"):
            if shutil.which(tool) is None:
                raise UnavailableError(f"{what} is not installed, and this machine has no {tool} to get Debian's with")
        shutil.rmtree(folder, ignore_errors=True)
        for name in ("lists/partial", "cache/archives/partial", "packages"):
            (folder / name).mkdir(parents=True)
        # Without root apt can neither take locks nor change its user. With its own lists it needs neither.
        self._settings = (
            f'Dir::State::lists "{folder}/lists";\nDir::Cache "{folder}/cache";\n'
            'Debug::NoLocking "true";\nAPT::Sandbox::User "root";\nAcquire::Languages "none";\n'
            'Acquire::http::Timeout "20";\nAcquire::https::Timeout "20";\nAcquire::Retries "1";\n'
        )
        if architecture:
            self._settings += f'APT::Architecture "{architecture}";\nAPT::Architectures {{"{architecture}";}};\n'
        (folder / "apt.conf").write_text(self._settings, encoding="utf-8")

    def use_suite(self, suite: str, *, with_sources: bool = False) -> None:
        """Uses one suite of the machine's Debian mirror, instead of the machine's own package sources.

        Args:
            suite: a suite of Debian: "testing". Backports are used together with their suite, and preferred to it.
            with_sources: also use the suite's source packages.

        Raises:
            UnavailableError: the machine has no Debian source, or its mirror lacks the suite.
        """
        mirror, keyring = self._debian_mirror()
        signed = f"Signed-By: {keyring}\n" if keyring else ""
        sources = self.folder / "newer.sources"
        suites = f"{suite.removesuffix('-backports')} {suite}" if suite.endswith("-backports") else suite
        types = "deb deb-src" if with_sources else "deb"
        text = f"Types: {types}\nURIs: {mirror}\nSuites: {suites}\nComponents: main\n{signed}"
        sources.write_text(text, encoding="utf-8")
        only = (
            f'Dir::Etc::sourcelist "{sources}";\nDir::Etc::sourceparts "/dev/null";\nAPT::Default-Release "{suite}";\n'
        )
        (self.folder / "apt.conf").write_text(self._settings + only, encoding="utf-8")
        self.run("apt-get", "update", "-q")

    def use_machine(self) -> None:
        """Uses the machine's own package sources, like a new object."""
        (self.folder / "apt.conf").write_text(self._settings, encoding="utf-8")

    def _debian_mirror(self) -> tuple[str, str]:
        """The address of Debian's archive in the machine's sources, and the path of its signing keys ("": none)."""
        self.use_machine()
        layout = "$(ORIGIN)|$(LABEL)|$(COMPONENT)|$(REPO_URI)|$(SOURCESENTRY)"
        for line in self.run("apt-get", "indextargets", "--format", layout, "Created-By: Packages").splitlines():
            origin, label, component, mirror, entry = line.split("|")
            if (origin, label, component) == ("Debian", "Debian", "main"):
                source = Path(entry.rpartition(":")[0])
                text = source.read_text(encoding="utf-8") if source.is_file() else ""
                match = re.search(r"signed-by\s*[:=]\s*(/[^\s\]]+)", text, re.IGNORECASE)
                return mirror, match[1] if match else ""
        raise UnavailableError(f"{self.what} is not installed, and this machine has no source of Debian's packages")

    def candidate(self, package: str) -> str:
        """The version that apt would install; empty if it knows none."""
        match = re.search(r"Candidate: (\S+)", self.run("apt-cache", "policy", package))
        return match[1] if match and match[1] != "(none)" else ""

    def missing(self, package: str) -> list[str]:
        """The package and those of its dependencies that are not installed."""
        names = self.dependencies("--recurse", package)
        installed = self.run("dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\\n")
        return sorted(names - set(re.findall(r"^(\S+) installed$", installed, re.MULTILINE)))

    def libraries(self, *packages: str) -> list[str]:
        """Packages and the libraries that they depend on, whether or not they are installed."""
        found: set[str] = set()
        names = set(packages)
        while names - found:
            found |= names
            names = {name for name in self.dependencies(*sorted(names)) if name.startswith(("lib", "zlib"))}
        return sorted(found)

    def dependencies(self, *arguments: str) -> set[str]:
        """The packages that `apt-cache depends` names."""
        no = [f"--no-{kind}" for kind in ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")]
        said = self.run("apt-cache", "depends", *no, *arguments)
        return set(re.findall(r"^(?:[ |]*\w*Depends: )?([a-z0-9][a-z0-9+.-]*)$", said, re.MULTILINE))

    def unpack(self, *packages: str) -> None:
        """Downloads packages and puts their files into `root/`."""
        # apt-get install would require that all system packages are in order.
        self.run("apt-get", "download", "-q", *packages)
        for file in sorted((self.folder / "packages").glob("*.deb")):
            self.run("dpkg-deb", "-x", str(file), str(self.folder / "root"))
            file.unlink()

    def source(self, package: str) -> Path:
        """Downloads the archive that a Debian package's upstream released."""
        self.run("apt-get", "source", "--download-only", "-q", package)
        return next(file for file in sorted((self.folder / "packages").glob("*.orig.tar.*")) if file.suffix != ".asc")

    def mirror(self) -> str:
        """The address of Debian's archive in the machine's sources."""
        return self._debian_mirror()[0]

    def finish(self) -> None:
        """Removes everything except the packages' files."""
        for name in STATE:
            shutil.rmtree(self.folder / name)

    def run(self, *command: str) -> str:
        """Runs a command; returns its stdout.

        Raises:
            UnavailableError: it fails; the message has its last line.
        """
        environment = os.environ | {
            "APT_CONFIG": str(self.folder / "apt.conf"),
            "LC_ALL": "C",
            "DEBIAN_FRONTEND": "noninteractive",
        }
        failed = f"{self.what} is not installed, and getting Debian's failed"
        try:
            done = subprocess.run(
                command,
                cwd=self.folder / "packages",
                env=environment,
                check=False,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UnavailableError(f"{failed}: {error}") from error
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
            raise UnavailableError(f"{failed}: {' '.join(command[:2])}: {last}")
        return done.stdout
