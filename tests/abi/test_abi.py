# SPDX-License-Identifier: Apache-2.0
"""ep/abi.h, which declares by hand the part of ONNX Runtime's ABI that we use, against the official headers.

Declarations that are newer than the official headers at hand are not checked; the test lists them (`pytest -s`). All
were compared once with the headers of API 29; `--onnxruntime-headers FOLDER` compares with other headers.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts import tools

ROOT = Path(__file__).parents[2]
ABI = ROOT / "ep" / "abi.h"
ENUMS = re.compile(r"^enum (\w+) : [\w:]+ \{(.*?)^\};", re.MULTILINE | re.DOTALL)
STRUCTS = re.compile(r"^struct (\w+) \{(.*?)^\};", re.MULTILINE | re.DOTALL)
FUNCTIONS = re.compile(r"\b(Api|EpApi|ModelEditorApi)Function<[^;]*?>\s*(\w+)\{\d+\};", re.DOTALL)
MEMBERS = re.compile(r"\(\*(\w+)\)\(|^\s+(?:void\*|std::uint32_t|bool) (\w+) =", re.MULTILINE)


def comparison(header_text: str) -> str:
    """The C++ program that compares every declaration."""
    abi = ABI.read_text()
    enums = {name: re.findall(r"^\s+(\w+) = \d+,", body, re.MULTILINE) for name, body in ENUMS.findall(abi)}
    structs = {
        name: [member for pair in MEMBERS.findall(body) for member in pair if member]
        for name, body in STRUCTS.findall(abi)
        if name != "Function"
    }
    functions = FUNCTIONS.findall(abi)
    assert len(enums) >= 6, "the patterns above no longer fit abi.h"
    assert len(structs) >= 6, "the patterns above no longer fit abi.h"
    assert len(functions) == len(re.findall(r"inline constexpr (?:Ep|ModelEditor)?ApiFunction", abi))

    def is_known(name: str) -> bool:
        return re.search(rf"\b{name}\b", header_text) is not None

    calls = [f"COMPARE_FUNCTION(Ort{table}, {name});" for table, name in functions]
    calls += [f"COMPARE_MEMBER({struct}, {member});" for struct, members in structs.items() for member in members]
    for names in enums.values():
        calls += [f"COMPARE_ENUMERATOR({name});" if is_known(name) else f'std::puts("newer {name}");' for name in names]
    translated = [f"struct {name};" for name in structs]
    types = [*structs, *(name for name in enums if is_known(name))]
    specializations = [
        f"template <> struct compare::Official<flownpu::ort::{name}> {{ using type = ::{name}; }};" for name in types
    ]
    return "\n".join(
        [
            *translated,
            '#include "onnxruntime_c_api.h"',
            '#include "ep/abi.h"',
            '#include "tests/abi/compare.h"',
            *specializations,
            "int main() {",
            *calls,
            "}",
        ]
    )


@pytest.fixture(scope="session")
def headers(pytestconfig: pytest.Config) -> Path:
    if given := pytestconfig.getoption("--onnxruntime-headers"):
        return Path(given).resolve()
    tools.fetch("onnxruntime-headers")
    found = tools.find("onnxruntime-headers")
    if found is None:
        pytest.skip(f"ONNX Runtime's official headers cannot be had: {tools.reason('onnxruntime-headers')}")
    return Path(found).parent


def test_declared_abi_equals_official_headers(headers: Path, tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    text = "\n".join(file.read_text() for file in headers.glob("onnxruntime*.h"))
    source = tmp_path / "compare.cc"
    source.write_text(comparison(text))
    program = tmp_path / "compare"
    subprocess.run(
        [compiler, "-std=c++20", "-w", f"-I{headers}", f"-I{ROOT}", str(source), "-o", str(program)], check=True
    )
    lines = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines()
    version = re.search(r"#define ORT_API_VERSION (\d+)", text)
    newer = [line.split()[1] for line in lines if line.startswith("newer")]
    print(f"\nofficial headers: API {version and version[1]}; {len(lines) - len(newer)} declarations compared")
    print(f"newer than these headers, not compared: {', '.join(newer) or 'none'}")

    assert [line for line in lines if line.startswith("different")] == []
    # API 23 is the oldest API of Debian's package so far, so at least its declarations must have been compared.
    assert len([line for line in lines if line.startswith("same")]) >= 100
