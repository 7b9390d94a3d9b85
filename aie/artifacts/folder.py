# SPDX-License-Identifier: Apache-2.0
"""A folder of compiled designs: xclbins, instructions, and the manifest that says what each was made of.

    manifest.json
    kernels/<source>.o             one object a kernel's source
    <array>/array.pdi              what is compiled once for all calls of an array
    <array>/array.xclbin           the same as XRT takes it, with arguments for the call with the most buffers
    <array>/<call>.mlir            the plan of a call, as the compiler gets it
    <array>/<call>.insts           the instructions that XRT sends for that call

All missing instructions of an array are compiled at once, with its PDI: aiecc compiles an array's cores, which takes
most of its time, each time that it is called.

aiecc measures the stack of each core and refuses one that is too small. The array is then planned again, once, with
what aiecc asks for, and the manifest keeps it (`stacks`). Where a core's code does not fit in program memory, the
array's kernels are compiled again, once, for size (`toolchain.SMALLER`), below kernels/smaller (`smaller`).

The folder is its own cache: the manifest has the digests of what each file was made of (`inputs`) and of the file
itself. Where both still hold, nothing is compiled again. Without a toolchain only MLIR and manifest are written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flownpu.aie.artifacts.toolchain import SMALLER, ToolchainError
from flownpu.aie.artifacts.xclbin import pack_xclbin
from flownpu.aie.check import require_valid
from flownpu.aie.mlir.module import to_mlir
from flownpu.aie.plan.data import Plan, Sequence, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from flownpu.aie.artifacts.toolchain import Toolchain
    from flownpu.aie.plan.data import Array, Kernel

MANIFEST = "manifest.json"
_FORMAT = 1
# aiecc copies the module for each core, sequence and device in it, and keeps the copies: 178 copies of a module with
# 36,146 tasks are reported to take 4.1 GB (Xilinx/mlir-aie#3689, September 2026). Here there are 34 and the sequences.
_MOST_TASKS = 36_000


class ArtifactFolder:
    """The artifacts of one target.

    Attributes:
        path: the folder.
        target: npu1 or npu2.
        compiled: files that were compiled since this was opened; empty where all were up to date.
    """

    def __init__(
        self,
        path: Path,
        target: str,
        toolchain: Toolchain | None,
        *,
        versions: dict[str, str] | None = None,
        include_root: Path | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Opens a folder, which need not exist.

        Args:
            path: the folder.
            target: npu1 or npu2.
            toolchain: what compiles; None writes MLIR only.
            versions: versions of other software, for the manifest.
            include_root: folder whose `aie/kernels/` holds the sources; None: this package's.
            say: called with a text where an array is planned again.

        Raises:
            ValueError: its manifest is another format's or another target's.
        """
        self.path, self.target, self.compiled = path, target, list[Path]()
        self._toolchain = toolchain
        self._include_root = include_root or Path(__file__).parents[2]
        self._say = say
        self._arrays_seen: dict[str, str] = {}
        self._stacks: dict[str, dict[str, int]] = {}  # by array: the new sizes of stacks that were too small
        self._planned_again: set[str] = set()
        self._smaller: set[str] = set()  # arrays whose kernels are compiled for size
        self._manifest = _read_manifest(path / MANIFEST, target) | {"versions": versions or {}}

    @property
    def compiles(self) -> bool:
        """Whether there is a toolchain."""
        return self._toolchain is not None

    def add(self, operator: str, array: str, plans: Mapping[str, Plan]) -> None:
        """Writes calls of an array, and compiles what is not up to date, all of it at once.

        Args:
            operator: the operator that the design computes.
            array: name of the array.
            plans: the plan of each call, by the call's name among the array's; the array is equal in all of them.

        Raises:
            PlanError: the plan breaks the hardware's limits.
            ValueError: a different array was added under that name.
            ToolchainError: a compiler failed.
        """
        for call, plan in plans.items():
            digest_of_array = _array_digest(plan.array)
            if self._arrays_seen.setdefault(array, digest_of_array) != digest_of_array:
                raise ValueError(f"[artifacts] two arrays that differ are both called {array}: {call} is of the second")
            if array not in self._stacks:
                self._stacks[array] = self._take_over_measured(array, plan.array)
        while True:
            try:
                self._add(operator, array, {call: self._with_stacks(array, plan) for call, plan in plans.items()})
            except ToolchainError as error:
                if not self._is_mended(array, error):
                    raise
            else:
                return

    def _is_mended(self, array: str, error: ToolchainError) -> bool:
        """Whether an array can be compiled again in another form, which is each tried once and said."""
        if error.overflow and array not in self._smaller:
            self._smaller.add(array)
            self._say(
                f"{array}: a core's code is {error.overflow} bytes more than program memory holds: its kernels are "
                f"compiled again for size ({' '.join(SMALLER)}), and are slower"
            )
            return True
        larger = error.larger_stacks
        if not larger or array in self._planned_again:
            return False
        self._planned_again.add(array)
        for had, need in larger.items():
            self._say(f"{array}: aiecc measured a stack of {need} bytes where {had} were planned: planned again")
        self._stacks[array] |= {str(had): need for had, need in larger.items()}
        return True

    def _take_over_measured(self, name: str, array: Array) -> dict[str, int]:
        """The stacks that the manifest has for an array, if the same compilers measured them with the same kernels.

        Whether the kernels are compiled for size is taken over with them.
        """
        old = self._manifest["arrays"].get(name, {})
        inputs = self._array_inputs(array, old)
        is_same = bool(old) and all(old.get("inputs", {}).get(key) == value for key, value in inputs.items())
        if is_same and old.get("smaller"):
            self._smaller.add(name)
        return dict(old.get("stacks", {})) if is_same else {}

    def _with_stacks(self, name: str, plan: Plan) -> Plan:
        """A plan of an array with the stacks that aiecc requested."""
        larger = self._stacks[name]
        if not larger:
            return plan
        cores = (
            replace(core, stack_bytes=larger.get(str(core.stack_bytes), core.stack_bytes)) for core in plan.array.cores
        )
        return replace(plan, array=replace(plan.array, cores=tuple(cores)))

    def _add(self, operator: str, array: str, plans: Mapping[str, Plan]) -> None:
        any_array = next(iter(plans.values())).array
        record = self._array_record(operator, array, any_array)
        folder = self.path / array
        for call, plan in plans.items():
            require_valid(plan)
            text = to_mlir(plan)
            write_text(folder / f"{call}.mlir", text)
            old = record["calls"].get(call, {})
            inputs = {"mlir": digest(text), "aiecc": self._compiler("aiecc", old)}
            buffers = [{"name": b.name, "type": str(b.type), "bytes": b.type.bytes} for b in plan.sequence.buffers]
            record["calls"][call] = {
                "buffers": buffers,
                "mlir": self._file(folder / f"{call}.mlir"),
                "inputs": inputs,
                "instructions": self._kept(old, "instructions", inputs),
            }
        if self._toolchain is not None:
            options = SMALLER if array in self._smaller else ()
            objects = [self._object(kernel, options) for kernel in any_array.kernels]
            self._compile(record, plans, objects, folder)
            self._pack(record, folder)
        self._write_manifest()

    def xclbin(self, array: str) -> str | None:
        """The path of an array's xclbin, relative to the folder; None: it is not compiled."""
        return self._compiled_file(self._manifest["arrays"][array]["xclbin"])

    def pdi(self, array: str) -> str | None:
        """The path of an array's PDI, which its xclbin is made of, relative to the folder; None: it is not compiled."""
        return self._compiled_file(self._manifest["arrays"][array]["pdi"])

    def instructions(self, array: str, call: str) -> str | None:
        """The path of a call's instructions, relative to the folder; None: they are not compiled."""
        return self._compiled_file(self._manifest["arrays"][array]["calls"][call]["instructions"])

    @staticmethod
    def _compiled_file(record: dict[str, str] | None) -> str | None:
        return record["file"] if record else None

    # --- What is compiled ---------------------------------------------------------------------------------------------

    def _compile(self, record: dict[str, Any], plans: Mapping[str, Plan], objects: list[Path], folder: Path) -> None:
        """Makes the missing files of an array's PDI and of calls' instructions."""
        missing = [call for call in plans if not record["calls"][call]["instructions"]]
        for places in compiled_at_once(count_tasks(plans[call].sequence) for call in missing):
            part = {missing[place]: plans[missing[place]] for place in places}
            self._compile_design(record, part, objects, folder, sequences=True)
            self._write_manifest()
        if not record["pdi"]:
            self._compile_design(record, dict([next(iter(plans.items()))]), objects, folder, sequences=False)

    def _compile_design(
        self, record: dict[str, Any], plans: Mapping[str, Plan], objects: list[Path], folder: Path, *, sequences: bool
    ) -> None:
        """Makes an array's PDI if it is missing and, if `sequences`, the instructions of calls."""
        assert self._toolchain is not None
        named = [
            replace(plan, sequence=replace(plan.sequence, name=f"sequence{place}"))
            for place, plan in enumerate(plans.values())
        ]
        with tempfile.TemporaryDirectory(prefix=".building-", dir=self.path) as name:
            work = Path(name)
            for file in dict.fromkeys(objects):
                (work / file.name).symlink_to(file.absolute())
            design, pdi = work / "design.mlir", None if record["pdi"] else work / "design.pdi"
            write_text(design, to_mlir(*named))
            try:
                names = [plan.sequence.name for plan in named] if sequences else []
                instructions = self._toolchain.compile_design(design, names, pdi)
            except ToolchainError as error:
                if (place := _failed_sequence(design, error.output)) is None:
                    raise
                raise ToolchainError(f"{error}\nthe call: {folder.name} {list(plans)[place]}", error.output) from error
            for call, file in zip(plans, instructions, strict=sequences):
                record["calls"][call]["instructions"] = self._take(file, folder / f"{call}.insts")
            if pdi:
                record["pdi"] = self._take(pdi, folder / "array.pdi")

    def _pack(self, record: dict[str, Any], folder: Path) -> None:
        """Makes the xclbin, again if a call has more buffers than the calls before it."""
        assert self._toolchain is not None
        buffers = max(len(call["buffers"]) for call in record["calls"].values())
        packed_of = {
            "pdi": record["pdi"]["sha256"],
            "buffers": buffers,
            "xclbinutil": self._toolchain.versions["xclbinutil"],
        }
        if record["xclbin"] and record["packed_of"] == packed_of:
            return
        with tempfile.TemporaryDirectory(prefix=".building-", dir=self.path) as name:
            xclbin = Path(name) / "array.xclbin"
            pdi = self.path / record["pdi"]["file"]
            pack_xclbin(self._toolchain.xclbinutil, pdi, xclbin, target=self.target, buffers=buffers)
            record["xclbin"] = self._take(xclbin, folder / xclbin.name)
        record["packed_of"] = packed_of

    def _object(self, kernel: Kernel, options: tuple[str, ...]) -> Path:
        """The object file of a kernel's source, compiled with more options if it is not up to date."""
        assert self._toolchain is not None
        name = ("smaller/" if options else "") + Path(kernel.source).stem + ".o"
        file = self.path / "kernels" / name
        old = self._manifest["kernels"].get(name, {})
        inputs = self._kernel_inputs(kernel, old)
        if not self._kept(old, "object", inputs):
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".building-", dir=self.path) as work:
                built = Path(work) / file.name
                source = self._include_root / "aie" / kernel.source
                self._toolchain.compile_kernel(source, self._include_root, self.target, options, built)
                self._manifest["kernels"][name] = {
                    "source": kernel.source,
                    "inputs": inputs,
                    "object": self._take(built, file),
                }
        return file

    def _kernel_inputs(self, kernel: Kernel, old: dict[str, Any]) -> dict[str, str]:
        """The inputs of an object file; all headers count, whichever a source includes."""
        folder = self._include_root / "aie" / "kernels"
        headers = "".join(file.read_text(encoding="utf-8") for file in sorted(folder.rglob("*.h")))
        return {
            "source": digest((self._include_root / "aie" / kernel.source).read_text(encoding="utf-8")),
            "headers": digest(headers),
            "peano": self._compiler("peano", old),
        }

    def _compiler(self, name: str, old: dict[str, Any]) -> str:
        """A compiler's version. Without a toolchain, the version that made the existing file, so that it is kept."""
        if self._toolchain is not None:
            return self._toolchain.versions[name]
        return str(old.get("inputs", {}).get(name, ""))

    # --- The manifest -------------------------------------------------------------------------------------------------

    def _array_record(self, operator: str, name: str, array: Array) -> dict[str, Any]:
        """A new record of an array in the manifest, with the parts of the old one that are up to date."""
        array_digest = _array_digest(array)
        old = self._manifest["arrays"].get(name, {})
        inputs = {"array": array_digest, **self._array_inputs(array, old)}
        record = {
            "operator": operator,
            "inputs": inputs,
            "pdi": self._kept(old, "pdi", inputs),
            "xclbin": self._kept(old, "xclbin", inputs),
            "packed_of": old.get("packed_of"),
            "stacks": self._stacks[name],
            "smaller": name in self._smaller,
            "compute_tiles": [[core.tile.column, core.tile.row] for core in array.cores],
            "kernels": {kernel.entry: [str(kind) for kind in kernel.arguments] for kernel in array.kernels},
            # The calls of a different array that had this name are dropped.
            "calls": old.get("calls", {}) if old.get("inputs", {}).get("array") == array_digest else {},
        }
        self._manifest["arrays"][name] = record
        return record

    def _array_inputs(self, array: Array, old: dict[str, Any]) -> dict[str, str]:
        """The inputs of an array's configuration besides its MLIR: the digest of its kernels, and the compilers."""
        kernels = {kernel.source: self._kernel_inputs(kernel, old) for kernel in array.kernels}
        inputs = {"kernels": digest(json.dumps(kernels, sort_keys=True))}
        return inputs | {compiler: self._compiler(compiler, old) for compiler in ("aiecc", "peano")}

    def _kept(self, old: dict[str, Any], kind: str, inputs: dict[str, str]) -> dict[str, str] | None:
        """The record of a file that was made of exactly these inputs and has not changed since; else None."""
        record: dict[str, str] | None = old.get(kind)
        if not record or old.get("inputs") != inputs:
            return None
        file = self.path / record["file"]
        return record if file.is_file() and digest(file.read_bytes()) == record["sha256"] else None

    def _take(self, built: Path, file: Path) -> dict[str, str]:
        """Moves what a compiler wrote to its place, and returns the manifest's record of it."""
        file.parent.mkdir(parents=True, exist_ok=True)
        built.replace(file)
        self.compiled.append(file)
        return self._file(file)

    def _file(self, file: Path) -> dict[str, str]:
        return {"file": file.relative_to(self.path).as_posix(), "sha256": digest(file.read_bytes())}

    def _write_manifest(self) -> None:
        write_text(self.path / MANIFEST, json.dumps(self._manifest, indent=1, sort_keys=True) + "\n")


def count_tasks(sequence: Sequence) -> int:
    """The number of a sequence's transfers, each a task of the compiler."""
    return sum(isinstance(step, Transfer) for step in sequence.steps)


def compiled_at_once(tasks: Iterable[int]) -> list[list[int]]:
    """The places of an array's programs in the parts that are compiled at once, from each program's number of tasks."""
    parts: list[list[int]] = []
    left = 0
    for place, count in enumerate(tasks):
        if not parts or count > left:
            parts.append([])
            left = _MOST_TASKS
        parts[-1].append(place)
        left -= count
    return parts


def _failed_sequence(design: Path, output: str) -> int | None:
    """The place of the sequence that aiecc's first error in a design is in; None: the error is elsewhere."""
    found = re.search(rf'{design.name}"?:(\d+):', output)
    lines = design.read_text(encoding="utf-8").splitlines()[: int(found[1])] if found else []
    sequences = sum("aie.runtime_sequence" in line for line in lines)
    return sequences - 1 if sequences else None


@lru_cache(maxsize=16)  # a call is compiled at several positions, all with the same array
def _array_digest(array: Array) -> str:
    """The digest of an array without a sequence, as the compiler gets it."""
    return digest(to_mlir(Plan("array", array, Sequence("sequence", (), ()))))


def digest(content: str | bytes) -> str:
    """The sha256 of a text or of bytes, in hexadecimal digits."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def write_text(file: Path, text: str) -> None:
    """Writes a text file completely or not at all, and makes its folder."""
    write_bytes(file, text.encode())


def write_bytes(file: Path, content: bytes) -> None:
    """Writes a file completely or not at all, and makes its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def _read_manifest(file: Path, target: str) -> dict[str, Any]:
    """A manifest, or an empty one where there is none.

    Raises:
        ValueError: it is another format's or another target's, or no manifest.
    """
    empty: dict[str, Any] = {"format": _FORMAT, "target": target, "kernels": {}, "arrays": {}}
    if not file.is_file():
        return empty
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        is_ours = (found["format"], found["target"]) == (_FORMAT, target) and _is_complete(found)
    except (ValueError, KeyError, TypeError, RecursionError):
        is_ours = False
    if not is_ours:
        raise ValueError(
            f"[artifacts] expected {file} to be a manifest of format {_FORMAT} for {target}, and it is not: "
            "choose another folder, or remove this one"
        )
    return dict(found)


def _is_complete(manifest: dict[str, Any]) -> bool:
    """Whether a manifest's records have all needed entries, with the right types."""

    def records(of: dict[str, Any], key: str) -> list[Any]:
        found = of.get(key)
        return list(found.values()) if isinstance(found, dict) else [found]

    def has_files(record: Any, *kinds: str) -> bool:
        files = [record.get(kind) for kind in kinds] if isinstance(record, dict) else [""]
        return all(
            file is None or (isinstance(file, dict) and isinstance(file.get("file"), str) and "sha256" in file)
            for file in files
        ) and isinstance(record.get("inputs", {}), dict)

    arrays = records(manifest, "arrays")
    return (
        all(has_files(record, "object") for record in records(manifest, "kernels"))
        and all(has_files(record, "pdi", "xclbin") for record in arrays)
        and all(has_files(call, "instructions") for record in arrays for call in records(record, "calls"))
    )
