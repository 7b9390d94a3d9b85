# SPDX-License-Identifier: Apache-2.0
"""The folder of compiled designs, with stand-ins for the toolchain that record their commands, and without one."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest

from flownpu import __version__
from flownpu.aie.artifacts import folder as artifacts
from flownpu.aie.artifacts import toolchain
from flownpu.aie.artifacts.folder import ArtifactFolder
from flownpu.aie.artifacts.toolchain import ToolchainError, find_toolchain
from flownpu.aie.check import PlanError
from flownpu.aie.designs.fused_dqp import FusedDQP
from flownpu.aie.designs.vector_operators import ResidualRMSNorm, RMSNorm
from flownpu.aie.mlir.module import to_mlir

ROOT = Path(__file__).parents[3]
# Two arrays of XDNA2's 32 tiles, with GeGLU and without activation, and M and K of Gemma3-1B's products on them.
PRODUCTS = {"geglu": [(6912, 1152)], "none": [(1536, 1152), (1152, 1024), (1152, 6912), (4096, 1152)]}
CALLS = 5
PLAIN = "fused_dqp-32-k6912-none"


def plans_of(epilogue):
    design = FusedDQP("npu2", 6912, 32, epilogue)
    return {f"m{m}-k{k}": design.program(m, k).resolve_program(f"m{m}-k{k}") for m, k in PRODUCTS[epilogue]}


@pytest.fixture(scope="module")
def plans():
    """The plans of the calls, by array."""
    return {f"fused_dqp-32-k6912-{epilogue}": plans_of(epilogue) for epilogue in PRODUCTS}


@pytest.fixture
def build(plans, tmp_path):
    """Compiles both arrays' calls into "out"; returns how many files were compiled, and what was said or is missing."""

    def run(*, said=None):
        found, missing = find_toolchain()
        said = [] if said is None else said
        folder = ArtifactFolder(tmp_path / "out", "npu2", found, versions={"flownpu": __version__}, say=said.append)
        for array, calls in plans.items():
            folder.add("fused_dqp", array, calls)
        return len(folder.compiled), [*said, *map(str, missing)]

    return run


def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def files(folder):
    """The digests of everything below a folder."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*")
        if file.is_file()
    }


def named_files(node):
    """Every {"file", "sha256"} in the manifest."""
    if isinstance(node, dict):
        if node.keys() == {"file", "sha256"}:
            yield node
        for value in node.values():
            yield from named_files(value)


# --- Without a toolchain --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_tools")
def test_missing_toolchain_still_writes_mlir(build, plans, tmp_path):
    compiled, said = build()
    assert compiled == 0
    remedies = {
        "aiecc": "pip install 'mlir_aie>=1.4.5'",
        "Peano": "pip install 'llvm-aie==22.*'",
        "xclbinutil": "libxrt-utils of XRT 2.19",
    }
    for tool, remedy in remedies.items():
        assert any(f"{tool} was not found" in line and remedy in line for line in said)
    for array, calls in plans.items():
        for call, plan in calls.items():
            assert (tmp_path / "out" / array / f"{call}.mlir").read_text() == to_mlir(plan)
    for array in manifest(tmp_path / "out")["arrays"].values():
        assert array["xclbin"] is None
        assert all(call["instructions"] is None for call in array["calls"].values())


def test_folder_of_other_target_is_refused(build, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.json").write_text('{"format": 1, "target": "npu1"}')
    with pytest.raises(ValueError, match="a manifest of format 1 for npu2, and it is not: choose another folder"):
        build()


# --- With one -------------------------------------------------------------------------------------------------------


def test_toolchain_commands_are_in_order(build, tools):
    build()
    commands = tools.commands()
    kernels = [command for command in commands if command[0] == "clang++"]
    designs = [command for command in commands if command[0] == "aiecc"]
    assert {Path(c[c.index("-c") + 1]).name for c in kernels} == {"fused_dqp.cc", "epilogue.cc"}
    assert len(kernels) == 2, "each source once, though both arrays link it"
    for command in kernels:
        assert "--target=aie2p-none-unknown-elf" in command
        assert "-std=c++20" in command
        # The first folder has the sources, for `#include "aie/kernels/kernels.h"`; the second mlir-aie's aie_api.
        include = [Path(option[2:]) for option in command if option.startswith("-I")]
        assert (include[0] / "aie" / "kernels" / "kernels.h").is_file()
        assert include[1] == tools.aiecc.parents[1] / "include"
    assert ["--get-pdi" in command for command in designs] == [True, True], "once for all calls of an array"
    packed = [command for command in commands if command[0] == "xclbinutil"]
    assert len(packed) == 2
    for command in packed:
        sections = [command[place + 1].split(":")[0] for place, option in enumerate(command) if "section" in option]
        assert sections == ["MEM_TOPOLOGY", "AIE_PARTITION"]
        assert "--add-kernel" in command
    for command in designs:
        assert "--get-npu-insts" in command
        assert f"--peano={tools.clang.parents[1]}" in command


@pytest.mark.parametrize(
    ("aiecc", "peano", "wrong"),
    [
        ("1.4.2", "22.0.0.2026092401+6dc4d6dd", ["an aiecc that takes FlowNPU's MLIR"]),
        ("0.0.1.2026033104+e4f35d6", "21.0.0.2026050601+2c363ce", ["an aiecc that takes", "the Peano that belongs to"]),
        ("1.4.6.dev3+g1234567", "21.0.0.2026080301+c9c5ecb7", ["the Peano that belongs to aiecc"]),
        ("1.4.5", "22.0.0.2026092401+6dc4d6dd", []),
    ],
)
def test_compilers_that_do_not_go_together_are_named_before_compiling(build, tools, tmp_path, aiecc, peano, wrong):
    tools.wheels(mlir_aie=aiecc, llvm_aie=peano)
    _, said = build()
    found = [line for line in said if "was not found" in line]
    both = f"(found mlir_aie {aiecc} with llvm_aie {peano}; expected mlir_aie 1.4.5 or newer with llvm-aie 22): pip"
    assert len(found) == len(wrong)
    assert all(start in line and both in line for start, line in zip(wrong, found, strict=True))
    assert (tools.commands() == []) == bool(wrong)
    if not wrong:
        assert manifest(tmp_path / "out")["arrays"][PLAIN]["inputs"]["aiecc"] == "mlir_aie 1.4.5"


@pytest.mark.usefixtures("tools")
def test_manifest_has_digest_of_files(build, tmp_path):
    compiled, _ = build()
    assert compiled == 11  # 2 objects, 2 PDIs, 2 xclbins, 5 instructions
    found = manifest(tmp_path / "out")
    on_disk = files(tmp_path / "out")
    on_disk.pop("manifest.json")
    assert {node["file"]: node["sha256"] for node in named_files(found)} == on_disk
    assert (found["target"], found["versions"]) == ("npu2", {"flownpu": __version__})
    array = found["arrays"][PLAIN]
    assert (array["inputs"]["aiecc"], array["inputs"]["peano"]) == ("aiecc 1.0", "clang++ 1.0")
    assert array["kernels"]["fused_dqp"] == ["5120xu8", "6912xbf16", "432xbf16", "32xf32", "i32", "i32"]
    assert len(array["compute_tiles"]) == 32
    # In blocks of 32 x 256: 48 x 5.
    assert array["calls"]["m1536-k1152"]["buffers"] == [
        {"name": "w", "type": "1228800xu8", "bytes": 48 * 5 * 5120},
        {"name": "x", "type": "6912xbf16", "bytes": 2 * 6912},
        {"name": "y", "type": "1536xbf16", "bytes": 2 * 1536},
    ]
    # The stand-in for aiecc wrote the objects that it found to link; three buffers are declared as five.
    assert (tmp_path / "out" / array["xclbin"]["file"]).read_text().startswith("8 arguments, --pdi-name with")
    assert "['epilogue.o', 'fused_dqp.o']" in (tmp_path / "out" / array["xclbin"]["file"]).read_text()


def test_second_build_compiles_nothing(build, tools, tmp_path):
    build()
    before = files(tmp_path / "out")
    tools.commands()
    compiled, _ = build()
    assert tools.commands() == []
    assert compiled == 0
    assert files(tmp_path / "out") == before


def test_damaged_file_is_built_again(build, tools, tmp_path):
    build()
    before = files(tmp_path / "out")
    tools.commands()
    for file, built in (("array.xclbin", ["xclbinutil"]), ("array.pdi", ["aiecc"])):
        (tmp_path / "out" / "fused_dqp-32-k6912-geglu" / file).write_bytes(b"damaged")
        build()
        assert [command[0] for command in tools.commands()] == built
        assert files(tmp_path / "out") == before


def test_changed_compiler_builds_all_again(build, tools, tmp_path):
    build()
    first = tools.commands()
    tools.install("1.1")
    build()
    assert len(tools.commands()) == len(first)
    assert manifest(tmp_path / "out")["arrays"][PLAIN]["inputs"]["aiecc"] == "aiecc 1.1"


@pytest.mark.usefixtures("no_tools")
def test_earlier_calls_stay_in_manifest(build, tools, tmp_path, monkeypatch):
    """Another operator is added; a machine without the toolchain keeps files that one with it has compiled."""
    monkeypatch.setenv("AIECC_PATH", str(tools.aiecc))
    monkeypatch.setenv("PEANO_INSTALL_DIR", str(tools.clang.parents[1]))
    monkeypatch.setenv("AIE_XCLBINUTIL", str(tools.xclbinutil))
    build()
    folder = ArtifactFolder(tmp_path / "out", "npu2", find_toolchain()[0])
    folder.add("add_rms_norm", "add_rms_norm", {"call": add_rms_norm()})
    found = manifest(tmp_path / "out")
    assert len(found["arrays"]) == 3
    monkeypatch.delenv("AIECC_PATH")
    build()
    assert manifest(tmp_path / "out")["arrays"] == found["arrays"]


@pytest.fixture
def sources(tmp_path):
    """A copy of the kernels that a test may change."""
    shutil.copytree(ROOT / "aie" / "kernels", tmp_path / "sources" / "aie" / "kernels")
    return tmp_path / "sources"


def add_rms_norm():
    return ResidualRMSNorm("npu2", 1152).program(1, 1e-6).resolve_program("call")


def rms_norm():
    return RMSNorm("npu2", 1152).program(1, 1e-6).resolve_program("call")


def add_calls(folder, tools_found, sources):
    """Builds FusedDQP and RMSNorm with the kernels in another folder."""
    artifact = ArtifactFolder(folder, "npu2", tools_found, include_root=sources)
    artifact.add("fused_dqp", "fused_dqp", plans_of("geglu"))
    artifact.add("rms_norm", "rms_norm", {"call": rms_norm()})
    return artifact


@pytest.mark.parametrize(
    ("changed", "rebuilt"),
    [("rms_norm.cc", {"rms_norm"}), ("common/loops.h", {"rms_norm", "fused_dqp"})],
)
def test_changed_kernel_rebuilds_arrays_that_link_it(tools, tmp_path, sources, changed, rebuilt):
    found, missing = toolchain.find_toolchain()
    assert missing == []
    add_calls(tmp_path / "out", found, sources)
    tools.commands()
    assert add_calls(tmp_path / "out", found, sources).compiled == []
    with (sources / "aie" / "kernels" / changed).open("a") as file:
        file.write("// changed\n")
    again = add_calls(tmp_path / "out", found, sources)
    xclbins = [file.parent.name for file in again.compiled if file.suffix == ".xclbin"]
    assert set(xclbins) == rebuilt
    objects = {file.name for file in again.compiled if file.suffix == ".o"}
    assert objects == ({"rms_norm.o"} if changed == "rms_norm.cc" else {"rms_norm.o", "fused_dqp.o", "epilogue.o"})
    # Instructions do not depend on kernels.
    assert not [file for file in again.compiled if file.suffix == ".insts"]


def test_different_array_of_same_name_is_refused(tmp_path):
    folder = ArtifactFolder(tmp_path, "npu2", None)
    folder.add("add_rms_norm", "array", {"call": add_rms_norm()})
    with pytest.raises(ValueError, match="two arrays that differ are both called array: another is of the second"):
        folder.add("rms_norm", "array", {"another": rms_norm()})


# --- Compilers that fail --------------------------------------------------------------------------------------------


def test_failing_compiler_is_quoted(build, tools, tmp_path):
    lines = "\n".join(f"line {number}" for number in range(100))
    tools.fail.write_text(f"3 {lines}")
    with pytest.raises(ToolchainError) as failed:
        build()
    shown = str(failed.value).splitlines()
    assert shown[0].endswith("clang++ ended with exit code 3:")
    assert shown[1:-1] == [f"line {number}" for number in range(80, 100)]
    command = tools.commands()[0]
    assert shown[-1].startswith("the command: ")
    assert all(part in shown[-1] for part in command)
    # Nothing half made is left.
    assert not [name for name in files(tmp_path / "out") if not name.endswith((".json", ".mlir"))]


def test_compiler_error_with_exit_code_0_fails(build, tools, tmp_path):
    """aiecc's passes report some errors and continue."""
    build()
    (tmp_path / "out" / PLAIN / "m1536-k1152.insts").unlink()
    tools.fail.write_text("0 design.mlir:1: error: would override allocated address")
    with pytest.raises(ToolchainError) as failed:
        build()
    assert "aiecc said that there was an error" in str(failed.value)
    assert "would override allocated address" in str(failed.value)


def test_sequence_that_fails_among_good_ones_is_named(build, plans, tools, tmp_path):
    tools.refused.write_text("sequence1")
    with pytest.raises(ToolchainError) as failed:
        build()
    assert "error: 'aiex.dma_configure_task_for' op cannot be lowered" in str(failed.value)
    assert re.findall("the call: (.*)", str(failed.value)) == [f"{PLAIN} {list(plans[PLAIN])[1]}"]
    assert {file.parent.name for file in (tmp_path / "out").rglob("*.insts")} == {"fused_dqp-32-k6912-geglu"}
    tools.refused.unlink()
    build()


@pytest.mark.parametrize("said", ["unknown output selector '--get-npu-insts'", "Unknown command line argument '--pdi'"])
def test_aiecc_without_option_is_named_with_both_versions(build, tools, tmp_path, said):
    build()
    (tmp_path / "out" / PLAIN / "m1536-k1152.insts").unlink()
    tools.fail.write_text(f"1 aiecc: {said}")
    with pytest.raises(ToolchainError) as failed:
        build()
    options = "expected the options of mlir_aie 1.4.5 or newer, found aiecc 1.0: pip install 'mlir_aie>=1.4.5'"
    assert options in str(failed.value)


def test_many_transfers_are_compiled_in_parts(build, tools, monkeypatch):
    monkeypatch.setattr(artifacts, "_MOST_TASKS", 1)
    build()
    designs = [command for command in tools.commands() if command[0] == "aiecc"]
    assert len(designs) == CALLS
    assert sum("--get-pdi" in command for command in designs) == 2, "the first of each array"


def test_stack_that_is_too_small_is_planned_again_once(build, tools, tmp_path):
    tools.stack.write_text("4416")
    _, said = build()
    text = f"{PLAIN}: aiecc measured a stack of 4416 bytes where 4096 were planned: planned again"
    assert said.count(text) == 1, "once for all calls of the array"
    design = tmp_path / "out" / PLAIN / "m1536-k1152.mlir"
    assert set(re.findall(r"stack_size = (\d+)", design.read_text())) == {"4416"}
    assert [command[0] for command in tools.commands()].count("aiecc") == 2 + 2
    _, again = build()
    assert (tools.commands(), again) == ([], []), "the manifest has the stacks"


def test_program_that_is_too_large_is_compiled_for_size_once(build, tools, tmp_path):
    tools.too_large.write_text("fused_dqp -fno-inline")
    _, said = build()
    text = f"{PLAIN}: a core's code is 1234 bytes more than program memory holds"
    assert sum(line.startswith(text) for line in said) == 1, "once for all calls of the array"
    assert (tmp_path / "out" / "kernels" / "smaller" / "fused_dqp.o").is_file()
    tools.commands()
    _, again = build()
    assert (tools.commands(), again) == ([], []), "the manifest has the form"


def test_program_that_is_too_large_in_both_forms_is_quoted(build, tools):
    tools.too_large.write_text("fused_dqp")
    said = []
    with pytest.raises(ToolchainError) as failed:
        build(said=said)
    assert "".join(said).count("compiled again for size (-Os -fno-inline)") == 1
    assert "will not fit in region 'program': overflowed by 1234 bytes" in str(failed.value)


def test_stack_without_room_is_refused(build, tools):
    tools.stack.write_text("60000")
    said = []
    with pytest.raises(PlanError, match=r"memory: need \d+ bytes, have 65536 bytes \(.*stack 60000"):
        build(said=said)
    assert "aiecc measured a stack of 60000 bytes" in said[0]


def test_compiler_that_writes_nothing_fails(build, tools):
    tools.fail.write_text("0 nothing to say")
    with pytest.raises(ToolchainError) as failed:
        build()
    assert "clang++ ended well, and did not write" in str(failed.value)


def test_interrupted_build_continues(build, tools, monkeypatch):
    """Files compiled before an error are not compiled again."""
    done = []

    def fail_at_the_second(self, mlir, sequences, pdi):
        done.append(mlir)
        if len(done) == 2:
            raise toolchain.ToolchainError("interrupted")
        return compile_design(self, mlir, sequences, pdi)

    compile_design = toolchain.Toolchain.compile_design
    monkeypatch.setattr(toolchain.Toolchain, "compile_design", fail_at_the_second)
    with pytest.raises(ToolchainError, match="interrupted"):
        build()
    before = tools.commands()
    build()
    assert [command[0] for command in before].count("aiecc") == 1
    assert [command[0] for command in tools.commands()].count("aiecc") == 1


# --- The package ----------------------------------------------------------------------------------------------------


def test_package_has_kernel_sources():
    """Peano needs them; the wheel leaves other C++ out."""
    sources = {file.name for file in (ROOT / "aie" / "kernels").glob("*.*") if file.suffix in {".cc", ".h"}}
    assert {file.name for file in toolchain.KERNELS.glob("*.*") if file.suffix in {".cc", ".h"}} == sources
    assert {"gemm.cc", "kernels.h"} <= sources
