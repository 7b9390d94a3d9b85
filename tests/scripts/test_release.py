# SPDX-License-Identifier: Apache-2.0
"""Releases (scripts/release/): contents of wheels, functions for older glibcs, versions, the steps of a release."""

import ctypes
import errno
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from flownpu import build_info, get_library_path
from scripts.debian_packages import UnavailableError
from scripts.release import building, contents, old_system, wheels

ROOT = Path(__file__).parents[2]
SHIMS = {"arc4random", "_dl_find_object", "__libc_single_threaded", "pthread_cond_clockwait"}
MACHINES = ("x86_64", "aarch64")
OLD_GLIBC = ROOT / "scripts/release/old_glibc.cc"
# Symbols that got a new version when glibc moved them: from libpthread and libdl in 2.34, from libc_nonshared.a in
# 2.33. Wheels are linked to the older version. Not those that wait by a given clock, which are new in 2.30 and 2.31.
MOVED = re.compile(
    r"(__)?pthread_(?!(cond|mutex|rwlock)_clock|clockjoin)\w+|dl(open|close|sym|addr|error)|[fl]?stat(at)?(64)?"
)


def compiled(folder, source, *flags, name="library.so"):
    """Compiles C++ to a library; returns its path."""
    (folder / "source.cc").write_text(source)
    library = folder / name
    files = [folder / "source.cc", *(flag for flag in flags if isinstance(flag, Path))]
    options = [flag for flag in flags if isinstance(flag, str)]
    subprocess.run(["g++", "-std=c++20", "-O1", "-fPIC", "-shared", *files, *options, "-o", library], check=True)
    return library


def newer_symbols(library):
    """The symbols that a library needs from a glibc newer than 2.28."""
    command = ["nm", "--dynamic", "--undefined-only", "--with-symbol-versions", library]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    wanted = re.findall(r"[Uw] (\w+)@+GLIBC_(\d+)\.(\d+)", said)
    return {name for name, *version in wanted if tuple(map(int, version)) > (2, 28)}


def test_libraries_need_no_newer_symbols_than_old_systems_have(tmp_path):
    """Otherwise an old system could not load a wheel.

    All symbols newer than glibc 2.28 must be moved ones or be defined in old_glibc.cc. (The tested build is linked to
    this machine's newer glibc.)
    """
    subprocess.run(["g++", "-std=c++20", "-fPIC", "-c", OLD_GLIBC, "-o", tmp_path / "shims.o"], check=True)
    said = subprocess.run(
        ["nm", "--extern-only", "--defined-only", "--format=posix", tmp_path / "shims.o"],
        check=True,
        capture_output=True,
        text=True,
    )
    defined = {line.split()[0] for line in said.stdout.splitlines()}
    assert defined == SHIMS
    folder = Path(get_library_path()).parent
    libraries = [file for file in folder.glob("*.so") if file.name.split(".")[0] in contents.LIBRARIES]
    assert len(libraries) >= len(contents.LIBRARIES) - 1  # without XRT one is not built
    for library in libraries:
        newer = newer_symbols(library)
        assert {name for name in newer if not MOVED.fullmatch(name)} - defined == set(), library


@pytest.fixture
def shims(tmp_path):
    """A library that contains the functions for older glibcs, and the C++ run-time library that calls them."""
    source = """
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <pthread.h>
#include <time.h>
extern "C" int caught(int x) {
  try {
    if (x > 1) throw std::runtime_error(std::string(x, 'x'));
  } catch (const std::runtime_error& error) {
    return std::string(error.what()).size();
  }
  return 0;
}
extern "C" unsigned random_bits() { return std::random_device("default")(); }
// The result of a wait of 125 ms that nobody ends.
extern "C" int expired() {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
  timespec until{};
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_nsec += 125'000'000;
  if (until.tv_nsec >= 1'000'000'000) ++until.tv_sec, until.tv_nsec -= 1'000'000'000;
  pthread_mutex_lock(&mutex);
  int said = 0;
  while (said == 0) said = pthread_cond_clockwait(&changed, &mutex, CLOCK_MONOTONIC, &until);
  pthread_mutex_unlock(&mutex);
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec < until.tv_sec || (now.tv_sec == until.tv_sec && now.tv_nsec < until.tv_nsec) ? -1 : said;
}
// Whether a wait of ten minutes that another thread ends says so.
extern "C" bool woken() {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::unique_lock lock(mutex);
  std::thread other([&] {
    const std::lock_guard held(mutex);
    done = true;
    changed.notify_all();
  });
  const bool said = changed.wait_for(lock, std::chrono::minutes(10), [&] { return done; });
  lock.unlock();
  other.join();
  return said;
}
"""
    flags = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL")
    library = compiled(tmp_path, source, OLD_GLIBC, *flags)
    return library, ctypes.CDLL(str(library))


def test_functions_for_older_glibc_wait_and_wake(shims):
    library, loaded = shims
    assert SHIMS & newer_symbols(library) == set()
    assert [loaded.caught(x) for x in (1, 3)] == [0, 3]  # the unwinder finds its table through old_glibc.cc's function
    assert len({loaded.random_bits() for _ in range(4)}) > 1  # fails by chance once in 2**96 runs
    # Eight waits of an eighth of a second: some pass a full second and some do not.
    assert {loaded.expired() for _ in range(8)} == {errno.ETIMEDOUT}
    assert loaded.woken()


WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp312-abi3-manylinux_2_28_x86_64\n"


def test_faulty_wheel_is_described(tmp_path):
    library = compiled(tmp_path, 'extern "C" const char* f() { return "/home/me/file.cc"; }', "-g").read_bytes()
    newer = compiled(tmp_path, '#include <cmath>\nextern "C" double f(double x) { return std::exp(x); }').read_bytes()
    wheel = tmp_path / "flownpu-1-cp312-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for stem in contents.LIBRARIES[:-1]:
            archive.writestr(f"flownpu/{stem}.so", newer if stem == "_native" else library)
        for licence in contents.LICENCES[:-1]:
            archive.writestr(f"flownpu-1.dist-info/licenses/{licence}", "")
        archive.writestr("flownpu-1.dist-info/WHEEL", WHEEL)
        archive.writestr("flownpu-1.dist-info/RECORD", "".join(f"{name},,\n" for name in archive.namelist()))
    found = "\n".join(contents.faults(wheel))
    for fault in (
        "expected the libraries _native, libflownpu_aie_xdna",
        f"expected the licence {contents.LICENCES[-1]}, found none",
        "flownpu/libflownpu_ep.so has a symbol table",
        "flownpu/libflownpu_ep.so names a folder of this machine: /home/me/file.cc",
        "its name says manylinux_2_28_x86_64, auditwheel manylinux_2_",
    ):
        assert fault in found
    assert "expected at most" not in found


def test_arm_wheel_is_built_without_xrt():
    names = {machine: contents.libraries_of(f"flownpu-1-cp311-cp311-manylinux_2_28_{machine}") for machine in MACHINES}
    assert [name for name in names["x86_64"] if name not in names["aarch64"]] == ["libflownpu_xrt"]


def test_wheels_have_licences_of_run_time_that_is_linked_in():
    """The licences in wheels are LICENSES.md's; Zig's run-time libraries are only in Arm's and Windows' wheels."""
    platforms = ("manylinux_2_28_x86_64", "manylinux_2_28_aarch64", "win_amd64")
    of_gcc, of_arm, of_windows = (set(contents.licences_of(f"flownpu-1-cp312-abi3-{name}")) for name in platforms)
    assert of_gcc == set(contents.LICENCES)
    text = (ROOT / "LICENSES.md").read_text(encoding="utf-8")
    assert of_arm - of_gcc == {name for name in ("llvm.txt", "zig.txt") if name in text}
    assert of_windows - of_arm == {"mingw-w64.txt"}


def test_build_id_comes_from_linker(tmp_path):
    source = 'extern "C" int f() { return 1; }'
    assert contents.build_id(compiled(tmp_path, source, "-Wl,--build-id=0x0123456789abcdef")) == "0123456789abcdef"
    with pytest.raises(RuntimeError, match="build ID"):
        contents.build_id(compiled(tmp_path, source, "-Wl,--build-id=none", name="without.so"))


def test_licences_name_compiled_libraries():
    text = (ROOT / "LICENSES.md").read_text(encoding="utf-8")
    for part in ("nanobind", "robin_map", "libstdc++", "libgcc", "glibc", *contents.LICENCES[2:]):
        assert part in text


def test_version_of_library_is_that_of_project(ep_devices):
    """The library's version is that of pyproject.toml, which CMake reads; two versions could differ."""
    expected = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert {device.ep_metadata["version"] for device in ep_devices} == {expected}


def test_build_information_names_commit_compiler_and_xrt(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["flownpu"], "__path__", [str(tmp_path)])
    assert str(build_info.build_info()) == "of a source tree"
    built = {"commit": "0123456789ab", "compiler": "GNU 12.2.0", "platform": "manylinux_2_28_x86_64", "xrt": "2.25"}
    (tmp_path / "build.json").write_text(json.dumps(built))
    said = "commit 0123456789ab, GNU 12.2.0 for manylinux_2_28_x86_64, XRT 2.25"
    assert str(build_info.build_info()) == said


def test_source_folder_is_updated_where_sources_changed(tmp_path):
    new, old = tmp_path / "new", tmp_path / "old"
    for folder, files in ((new, {"a": "1", "b/c": "2"}), (old, {"a": "1", "b/c": "3", "d": "4"})):
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    before = (old / "a").stat().st_mtime_ns
    wheels._update(new, old)
    assert {str(file.relative_to(old)): file.read_text() for file in old.rglob("*") if file.is_file()} == {
        "a": "1",
        "b/c": "2",
    }
    assert (old / "a").stat().st_mtime_ns == before


def test_compiled_objects_are_kept_for_next_python(tmp_path):
    """Otherwise scikit-build-core would remove all compiled files, because the next Python has another environment."""
    from scikit_build_core.cmake import CMake, CMaker

    build = tmp_path / "build"
    build.joinpath("CMakeFiles").mkdir(parents=True)
    compiled_before, found_before = build / "CMakeFiles" / "a.o", build / "CMakeCache.txt"
    notes = {"source_dir": str(tmp_path), "skbuild_path": "/another/environment"}
    for file, text in ((compiled_before, ""), (found_before, ""), (build / ".skbuild-info.json", json.dumps(notes))):
        file.write_text(text)
    building.forget_python(build)
    CMaker(CMake.default_search(), source_dir=tmp_path, build_dir=build, build_type="Release")
    assert compiled_before.exists()
    assert not found_before.exists()


def test_missing_python_is_unavailable(monkeypatch):
    monkeypatch.setattr(building, "STABLE_ABI", ("3.98", "3.99"))
    monkeypatch.setattr(building, "OWN_ABI", "{}.{}".format(*sys.version_info))
    monkeypatch.setattr(
        building, "_python", lambda version: None if version in building.STABLE_ABI else Path(sys.executable)
    )
    with pytest.raises(UnavailableError, match=r"expected Python 3\.98 or 3\.99 with its headers"):
        building.pythons()


def test_wheel_requirements_are_read(tmp_path):
    wheel = tmp_path / "x.whl"
    lines = ["numpy>=1.26", "onnx>=1.19; extra == 'convert'", "torch; extra == 'verify'"]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("x-1.dist-info/METADATA", "\n".join(f"Requires-Dist: {line}" for line in lines))
    assert old_system._requirements(wheel, "convert") == ["numpy>=1.26", "onnx>=1.19"]
