# SPDX-License-Identifier: Apache-2.0
"""`flownpu doctor` on obstacles: a slow processor, limits of memory and time, wrong libraries."""

import struct
import sys
from pathlib import Path

import psutil
import pytest

from flownpu.doctor import libraries, limits
from flownpu.doctor.checks import Check, Host, Status
from flownpu.doctor.diagnosis import diagnose_software
from flownpu.doctor.libraries import BUILD_HERE, NEWER_SYSTEM, REINSTALL, diagnose_module, diagnose_provider
from flownpu.doctor.limits import HOST_PROCESSOR, MORE_MEMORY, MORE_TIME, NEEDED, diagnose_machine
from flownpu.machine import cpu_isa, describe_machine
from flownpu.registration import get_library_path

CGROUP2 = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"


def checks_of(root, **files):
    """The checks of a machine with these files: `proc__cpuinfo` is /proc/cpuinfo."""
    for name, text in {"proc__self__mountinfo": CGROUP2, "proc__self__cgroup": "0::/", **files}.items():
        file = root / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return {check.name: check for check in diagnose_machine(Host(root=root))}


@pytest.mark.parametrize(
    ("machine", "lines", "slow", "remedy"),
    [
        ("x86_64", "flags : sse2", "AVX2", NEEDED["x86_64"][1]),
        ("x86_64", "flags : sse2 hypervisor", "AVX2", HOST_PROCESSOR),
        ("x86_64", "flags : avx2 fma f16c hypervisor", "", ""),
        ("aarch64", "Features : fp asimd", "dot products", NEEDED["aarch64"][1]),
        ("aarch64", "Features : fp asimd asimddp", "", ""),
    ],
)
def test_processor_without_fast_kernels_is_noted(tmp_path, monkeypatch, machine, lines, slow, remedy):
    monkeypatch.setattr(limits.platform, "machine", lambda: machine)
    check = checks_of(tmp_path, proc__cpuinfo=lines)["processor"]
    assert (check.status, check.remedy) == (Status.NOTE if slow else Status.GOOD, remedy)
    assert check.found.endswith(f"; the CPU kernels are slow without {slow}" if slow else " cores")


def test_cpu_quota_is_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "cpu_count", lambda: 8)
    checks = checks_of(tmp_path, **{"sys__fs__cgroup__cpu.max": "50000 100000"})
    file = tmp_path / "sys/fs/cgroup/cpu.max"
    assert checks["cpu quota"] == Check(
        "cpu quota",
        Status.NOTE,
        f"0.5 of 8 processors ({file}): 1 thread computes, which stands still for a part of each period",
        MORE_TIME,
    )
    assert "1 cores" in checks["processor"].found


def test_memory_limits_are_reported(tmp_path):
    checks = checks_of(
        tmp_path,
        **{"sys__fs__cgroup__memory.max": str(2**29)},
        proc__self__limits="Max address space         1073741824           unlimited            bytes",
    )
    assert checks["memory limit"].remedy == MORE_MEMORY
    assert checks["memory limit"].found.startswith("0.5 of ")
    assert checks["address space"] == Check(
        "address space",
        Status.BAD,
        "1.0 GiB, in which the model's file has to fit when it is mapped",
        "ulimit -v unlimited",
    )


def test_machine_without_limits_has_no_checks_of_them(tmp_path):
    unlimited = "Max address space         unlimited            unlimited            bytes"
    assert set(checks_of(tmp_path, proc__self__limits=unlimited)) == {"processor", "threads", "memory"}


def provider(monkeypatch, library, said):
    """The check of a provider's library that the loader refuses with the message `said`."""

    def refuse(_):
        raise OSError(said)

    monkeypatch.setattr(libraries, "get_library_path", lambda: str(library))
    monkeypatch.setattr(libraries.ctypes, "CDLL", refuse)
    return diagnose_provider()


NEEDS_236 = "/lib/libc.so.6: version `GLIBC_2.34' not found; version `GLIBC_2.36' not found (required by it)"


@pytest.mark.parametrize(("glibc", "remedy"), [("2.17", NEWER_SYSTEM), ("2.31", REINSTALL), ("", NEWER_SYSTEM)])
def test_glibc_too_old_is_bad(monkeypatch, glibc, remedy):
    monkeypatch.setattr(libraries.platform, "libc_ver", lambda: ("glibc", glibc))
    check = provider(monkeypatch, get_library_path(), NEEDS_236)
    assert check == Check(
        "provider library", Status.BAD, f"needs glibc 2.36, and this system has {glibc or 'none'}", remedy
    )


def test_library_for_other_architecture_is_bad(monkeypatch, tmp_path):
    header = bytearray(Path(get_library_path()).read_bytes()[:64])
    header[18:20] = struct.pack("<H", 183)  # EM_AARCH64
    library = tmp_path / "libflownpu_ep.so"
    library.write_bytes(header)
    monkeypatch.setattr(libraries.platform, "machine", lambda: "x86_64")
    check = provider(monkeypatch, library, "cannot open shared object file: No such file or directory")
    found = "is for aarch64, and this Python is of x86_64"
    assert check == Check("provider library", Status.BAD, found, f"a Python for aarch64, or {BUILD_HERE}")


def test_address_space_too_small_for_library_is_bad(monkeypatch):
    check = provider(monkeypatch, get_library_path(), "failed to map segment from shared object")
    assert (check.status, check.remedy) == (Status.BAD, "ulimit -v unlimited")


def test_onnxruntime_in_two_folders_is_bad(monkeypatch):
    monkeypatch.setattr(
        "flownpu.doctor.diagnosis.module_folders", lambda _: {"/home/me/.local": "1.20.1", "/venv": "1.31.1"}
    )
    check = {check.name: check for check in diagnose_software()}["onnxruntime"]
    assert check.status is Status.BAD
    assert check.found == "2 times: 1.20.1 in /home/me/.local and 1.31.1 in /venv; the first is imported"
    assert check.remedy.count("pip uninstall -y onnxruntime") == 2


def test_module_for_other_python_is_bad(monkeypatch, flownpu):
    monkeypatch.setitem(sys.modules, "flownpu._native", None)
    assert diagnose_module().remedy == REINSTALL
    done = flownpu("run", "model")
    assert done.code == 1
    assert done.err.startswith("error: native module import of flownpu._native halted")
    assert flownpu("--version").code == 0
    done = flownpu("doctor")
    assert done.code == 1
    assert "BAD  native module" in done.out
    assert "processor" not in done.out


AVX512 = "fma f16c avx2 avx512f avx512bw avx512dq avx512vl"


@pytest.mark.parametrize(
    ("flags", "isa"),
    [
        ("sse2 avx", "generic"),
        ("avx2 fma f16c", "avx2"),
        (AVX512, "avx512"),
        (f"{AVX512} avx512_vnni", "avx512 with vnni"),
        (f"{AVX512} avx512_vnni avx512_bf16", "avx512 with vnni and bf16"),
        (f"{AVX512} avx512_vnni avx512_bf16 amx_tile amx_int8", "avx512 with vnni, bf16 and amx"),
        ("fp asimd", "generic"),
        ("fp asimd asimddp", "dotprod"),
        ("fp asimd asimddp i8mm bf16", "i8mm"),
    ],
)
def test_instruction_sets_are_listed(machine, flags, isa):
    assert cpu_isa(set(flags.split())) == isa
    machine.file("proc/cpuinfo", f"processor : 0\nmodel name : Ryzen AI 9\nflags : {flags}\nprocessor : 1\nflags :")
    described = describe_machine(machine.root)
    assert (described.cpu, described.isa) == ("Ryzen AI 9", isa)


def test_machine_without_cpuinfo_has_generic_isa(machine):
    assert describe_machine(machine.root).isa == "generic"
