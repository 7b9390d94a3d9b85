# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for aiecc, Peano and xclbinutil, which record their commands and write the requested files."""

import json
import sys

# The program of all stand-ins. It writes the files that its options name; aiecc links the objects in the folder where
# it runs. If the file `fail` exists, it ends with the exit code and the text in that file. Instructions have the form
# that aie/plan/instructions.py describes: a transfer's descriptor has the lowest number that is free on its tile, and
# holds the transfer's sizes and strides (stride 0 for a dimension of one step). If the file `unknown` exists, an
# operation that belongs to no step is added. If the file `stack` exists, aiecc refuses stacks of fewer bytes; if
# `refused` exists, the sequence that it names. In the name of instructions aiecc replaces {0} by `<device>_<sequence>`.
STAND_IN = r"""#!{python}
import array, json, os, pathlib, re, sys, zlib
name = pathlib.Path(sys.argv[0]).name
if "--version" in sys.argv:
    print("XRT Build Version: 2.25.00" if name == "xclbinutil" else f"{{name}} {version}\nsecond line")
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
    pathlib.Path(sys.argv[-1]).write_text(f"object of {{source.read_text()}} with {{sys.argv[1:]}}")
elif name == "xclbinutil":
    options = dict(zip(sys.argv[1:], sys.argv[2:]))
    kernels = json.loads(pathlib.Path(options["--add-kernel"]).read_text())["ps-kernels"]["kernels"]
    partition = json.loads(pathlib.Path(options["--add-replace-section"].split(":")[-1]).read_text())["aie_partition"]
    pdi = pathlib.Path(partition["PDIs"][0]["file_name"]).read_text()
    pathlib.Path(options["--output"]).write_text(f"{{len(kernels[0]['arguments'])}} arguments, {{pdi}}")
else:
    too_large = pathlib.Path({too_large!r})
    source, _, flag = too_large.read_text().partition(" ") if too_large.exists() else ("none", "", "")
    linked = pathlib.Path(sys.argv[1]).with_name(source + ".o")
    if linked.exists() and not (flag and flag in linked.read_text()):
        print("ld.lld: error: section '.text' will not fit in region 'program': overflowed by 1234 bytes")
        sys.exit(1)
    need = pathlib.Path({stack!r})
    need = int(need.read_text()) if need.exists() else 0
    for size in re.findall(r"stack_size = (\d+)", pathlib.Path(sys.argv[1]).read_text()):
        if int(size) < need:
            print(f"design.mlir:9:5: error: stack_size = {{size}} is insufficient: this core needs {{need - 8}} bytes; "
                  f"increase stack_size to {{need}} (Worker(stack_size=...) in IRON), or pass --no-measure-stack-size")
            sys.exit(1)
    text = pathlib.Path(sys.argv[1]).read_text()
    refused = pathlib.Path({refused!r})
    refused = refused.exists() and text.find("@" + refused.read_text())
    if refused > 0:
        line = 2 + text[:refused].count("\n")
        print(f"{{sys.argv[1]}}:{{line}}:7: error: 'aiex.dma_configure_task_for' op cannot be lowered")
        sys.exit(1)
    design, *sequences = text.split("aie.runtime_sequence @")
    tiles = {{}}
    for name, ends in re.findall(r"aie\.objectfifo @(\w+)\((.*)\)", design):
        tiles[name] = next((end for end in re.findall(r"%tile_\d+_\d+", ends) if end.endswith("_0")), "")
    def instructions(sequence):
        words, used, tasks = array.array("I", [1, 8, 0, 0]), {{}}, {{}}
        def add(*operation):
            words.extend(word % 2**32 for word in operation)
            words[2] += 1
        lines = sequence.splitlines()
        for place_of_line, line in enumerate(lines):
            if found := re.search(r"(%\w+) = aiex.dma_configure_task_for @(\w+) ", line):
                task, fifo = found.groups()
                said = lines[place_of_line + 3]  # behind the descriptor and its end
                tile = tiles[fifo]
                number = min(set(range(99)) - used.setdefault(tile, set()))
                used[tile].add(number)
                tasks[task] = tile, number, fifo
                repeat = int((re.findall("repeat_count = ([0-9]+)", said) or [0])[0])
            elif "dma_bd" in line:
                lists = [re.findall(r"\d+", text) for text in re.findall(r"\[(.*?)\]", line)]
                pairs = [(int(n), int(s)) for n, s in zip(*lists)]
                pairs = [(0, 0)] * (4 - len(pairs)) + [(n - 1, s if n > 1 else 0) for n, s in pairs]
                length, offset, argument = (int(re.search(key, line)[1])
                                            for key in (r"len = (\d+)", r"offset = (\d+)", r"%arg(\d+)"))
                place = zlib.crc32(tile.encode()) << 8
                row = [size << 20 | stride % 2**20 for size, stride in pairs]
                add(1, 0, place + 32 * number, 48, length, offset, *row, sum(size for size, _ in pairs), 7)
                add(129, 48, 0, 0, 0, 0, place + 32 * number + 4, 0, argument, 0, 2 * offset, 0)
                if "issue_token" in said:
                    add(3, 0, place, 0, 1, 2, 28)
                add(0, 0, zlib.crc32(fifo.encode()), 0, repeat << 16 | number, 24)
            elif found := re.search(r"dma_(await|free)_task\((%\w+)\)", line):
                tile, number, fifo = tasks[found[2]]
                used[tile].discard(number)
                if found[1] == "await":
                    add(128, 16, zlib.crc32(fifo.encode()), 0)
            elif found := re.search(r"npu.rtp_write\((.*), %\w+\)", line):
                value = int(re.search(r"constant (-?\d+)", lines[place_of_line - 1])[1])
                add(0, 0, zlib.crc32(found[1].encode()), 0, value, 24)
            elif found := re.search(r"set_lock\((.*), (\d+)\)", line):
                add(0, 0, zlib.crc32(found[1].encode()), 0, int(found[2]), 24)
        if pathlib.Path({unknown!r}).exists():
            add(0, 0, 0, 0, 0, 24)
        words[3] = 4 * len(words)
        return words.tobytes()
    objects = sorted(file.name for file in pathlib.Path.cwd().glob("*.o") if file.exists())
    for option in sys.argv:
        key, _, value = option.partition("=")
        if key == "--npu-insts-name":
            for sequence in sequences:
                name = "main_" + sequence.partition("(")[0]
                pathlib.Path(value.replace("{{0}}", name)).write_bytes(instructions(sequence))
        if key == "--pdi-name":
            pathlib.Path(value).write_text(f"{{key}} with {{objects}} of {{design}}")
"""


class Tools:
    """Installs the stand-ins below a folder, and reports their commands."""

    def __init__(self, folder, monkeypatch):
        self.log, self.fail, self.unknown = folder / "log", folder / "fail", folder / "unknown"
        self.stack, self.refused = folder / "stack", folder / "refused"
        self.too_large = folder / "too_large"  # a kernel's source and, if one makes it small enough, an option of Peano
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
            names = ("log", "fail", "unknown", "stack", "refused", "too_large")
            files = {name: str(getattr(self, name)) for name in names}
            file.write_text(STAND_IN.format(python=sys.executable, version=version, **files))
            file.chmod(0o755)

    def wheels(self, **versions):
        """Makes the stand-ins those of wheels of these versions: mlir_aie, llvm_aie."""
        for wheel, version in versions.items():
            (self.aiecc.parents[2] / f"{wheel}-{version}.dist-info").mkdir()

    def commands(self):
        """The commands that ran since the last call, each a list of the tool's name and its arguments."""
        text = self.log.read_text() if self.log.exists() else ""
        self.log.unlink(missing_ok=True)
        return [json.loads(line) for line in text.splitlines()]
