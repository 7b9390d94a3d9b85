# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for aiecc, Peano and xclbinutil, which record what they are told and write the files asked of them."""

import json
import sys

# Writes the files that its options name; what it links is in the folder it runs in. FAIL makes it fail as it says.
# Instructions are the numbers of each step, a dimension of one step without its stride.
STAND_IN = """#!{python}
import array, json, os, pathlib, re, sys
name = pathlib.Path(sys.argv[0]).name
if "--version" in sys.argv:
    print("XRT Build Version: 2.25.00" if name == "xclbinutil" else f"{{name}} {version}\\nsecond line")
    sys.exit()
with open({log!r}, "a") as log:
    print(json.dumps([name, *sys.argv[1:]]), file=log)
fail = pathlib.Path({fail!r})
if fail.exists():
    code, text = fail.read_text().split(" ", 1)
    print(text, file=sys.stderr)
    sys.exit(int(code))
if name == "clang++":
    source = pathlib.Path(sys.argv[sys.argv.index("-c") + 1])
    pathlib.Path(sys.argv[-1]).write_text(f"object of {{source.read_text()}}")
elif name == "xclbinutil":
    options = dict(zip(sys.argv[1:], sys.argv[2:]))
    kernels = json.loads(pathlib.Path(options["--add-kernel"]).read_text())["ps-kernels"]["kernels"]
    partition = json.loads(pathlib.Path(options["--add-replace-section"].split(":")[-1]).read_text())["aie_partition"]
    pdi = pathlib.Path(partition["PDIs"][0]["file_name"]).read_text()
    pathlib.Path(options["--output"]).write_text(f"{{len(kernels[0]['arguments'])}} arguments, {{pdi}}")
else:
    words = array.array("I")
    for line in pathlib.Path(sys.argv[1]).read_text().partition("aie.runtime_sequence")[2].splitlines():
        if "dma_bd" in line:
            pairs = [(int(n), int(s)) for n, s in re.findall(r"size = (\\d+), stride = (\\d+)", line)]
            pairs = [(0, 0)] * (4 - len(pairs)) + [(n - 1, s if n > 1 else 0) for n, s in pairs]
            words.extend(number for pair in pairs for number in pair)
            words.extend(int(number) for number in re.findall(r"(?:len|offset) = (\\d+)", line))
        elif "configure_task" in line:
            words.append(int((re.findall("repeat_count = ([0-9]+)", line) or [0])[0]))
        else:
            words.extend(int(number) % 2**32 for number in re.findall(r"value = (-?\\d+)", line))
    objects = sorted(file.name for file in pathlib.Path.cwd().glob("*.o") if file.exists())
    for option in sys.argv:
        key, _, value = option.partition("=")
        if key == "--npu-insts-name":
            pathlib.Path(value).write_bytes(words.tobytes())
        if key == "--pdi-name":
            pathlib.Path(value).write_text(f"{{key}} with {{objects}} of {{pathlib.Path(sys.argv[1]).read_text()}}")
"""


class Tools:
    """The stand-ins."""

    def __init__(self, folder, monkeypatch):
        self.log, self.fail = folder / "log", folder / "fail"
        self.aiecc = folder / "mlir_aie" / "bin" / "aiecc"
        self.clang = folder / "peano" / "bin" / "clang++"
        self.xclbinutil = folder / "xrt" / "xclbinutil"
        self.install("1.0")
        monkeypatch.setenv("AIECC_PATH", str(self.aiecc))
        monkeypatch.setenv("PEANO_INSTALL_DIR", str(self.clang.parents[1]))
        monkeypatch.setenv("AIE_XCLBINUTIL", str(self.xclbinutil))

    def install(self, version):
        for file in (self.aiecc, self.clang, self.xclbinutil):
            file.parent.mkdir(parents=True, exist_ok=True)
            text = STAND_IN.format(python=sys.executable, version=version, log=str(self.log), fail=str(self.fail))
            file.write_text(text)
            file.chmod(0o755)

    def commands(self):
        """What was run since this was asked last."""
        text = self.log.read_text() if self.log.exists() else ""
        self.log.unlink(missing_ok=True)
        return [json.loads(line) for line in text.splitlines()]
