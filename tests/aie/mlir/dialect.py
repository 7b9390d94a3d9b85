# SPDX-License-Identifier: Apache-2.0
"""The forms of AIE operations in mlir_aie 1.4.5, and printed MLIR as an mlir-opt without the AIE dialects reads it.

Each form was read in mlir-aie's public tests of August and September 2026 (test/objectFifo-stateful-transform,
test/dialect, test/npu-xrt), and again in November 2026, those of aiex in AIEX.td. A line of an operation that has no
form here is of another dialect, and an error.
"""

import re

VALUE, KIND, TILE = r"%\w+", r"memref<\d+x\w+>", r"%tile_\d+_\d+"
_PAIRS = r"\[<size = \d+, stride = \d+>(?:, <size = \d+, stride = \d+>)*\]"
_END = rf"{TILE}(?: dimensions(?:To|From)Stream {_PAIRS})?"
_NUMBERS = r"\[\d+(?:, \d+)*\]"

# Operations that open a region: the form, the generic form, and the end of the region in generic form.
_REGIONS = [
    (r"aie\.device\(npu[12]\) \{", '"aie.device"() ({', "}) : () -> ()"),
    (rf"({VALUE}) = aie\.core\(({TILE})\) \{{", r'\1 = "aie.core"(\2) ({', "}) : (index) -> index"),
    (r"aie\.runtime_sequence @\w+\((.*)\) \{", r'"aie.runtime_sequence"() ({ ^bb0(\1):', "}) : () -> ()"),
    (
        rf"({VALUE}) = aiex\.dma_configure_task_for @\w+ \{{",
        r'\1 = "aiex.dma_configure_task_for"() ({',
        "}) : () -> index",
    ),
    (r"(module|scf\.for .*) \{", r"\1 {", "}"),
]
_CLOSED = re.compile(
    r"\}|\} \{(?:dynamic_objfifo_lowering = true, )?stack_size = \d+ : i32\}"
    r"|\} \{(?:issue_token = true)?(?:, )?(?:repeat_count = \d+ : i32)?\}"
)
# Other operations: the form, and the generic form.
_LINES = [
    (rf"({TILE}) = aie\.tile\(\d, \d\)", r'\1 = "aie.tile"() : () -> index'),
    (
        rf'({VALUE}) = aie\.buffer\(({TILE})\) \{{sym_name = "\w+"\}} : ({KIND})(?: = dense<\[.*\]>)?',
        r'\1 = "aie.buffer"(\2) : (index) -> \3',
    ),
    (
        rf'({VALUE}) = aie\.lock\(({TILE})\) \{{init = \d+ : i32, sym_name = "\w+"\}}',
        r'\1 = "aie.lock"(\2) : (index) -> index',
    ),
    (
        rf"aie\.objectfifo @\w+\({_END}, \{{{_END}(?:, {_END})*\}}, \[\d+ : i32(?:, \d+ : i32)+\]\)"
        rf" : !aie\.objectfifo<{KIND}>",
        '"aie.objectfifo"() : () -> ()',
    ),
    (
        rf"aie\.objectfifo\.link \[@\w+(?:, @\w+)*\] -> \[@\w+(?:, @\w+)*\]\((?:\[\]|{_NUMBERS}) (?:\[\]|{_NUMBERS})\)",
        '"aie.objectfifo.link"() : () -> ()',
    ),
    (
        rf"({VALUE}(?:, {VALUE})*) = aie\.objectfifo\.acquire @\w+\((?:Produce|Consume), \d+\) : ({KIND}(?:, {KIND})*)",
        r'\1 = "aie.objectfifo.acquire"() : () -> (\2)',
    ),
    (r"aie\.objectfifo\.release @\w+\((?:Produce|Consume), \d+\)", '"aie.objectfifo.release"() : () -> ()'),
    (rf"aie\.use_lock\(({VALUE}), (?:Acquire|Release), ({VALUE})\)", r'"aie.use_lock"(\1, \2) : (index, i32) -> ()'),
    (
        rf"aie\.dma_bd\(({VALUE}) : ({KIND}) offset = \d+ len = \d+(?: sizes = {_NUMBERS} strides = {_NUMBERS})?\)",
        r'"aie.dma_bd"(\1) : (\2) -> ()',
    ),
    (r"aie\.end", '"aie.end"() : () -> ()'),
    (rf"aiex\.(dma_start_task|dma_await_task|dma_free_task)\(({VALUE})\)", r'"aiex.\1"(\2) : (index) -> ()'),
    (rf"aiex\.npu\.rtp_write\(@\w+, \d+, ({VALUE})\) : i32", r'"aiex.npu.rtp_write"(\1) : (i32) -> ()'),
    (rf"aiex\.set_lock\(({VALUE}), \d+\)", r'"aiex.set_lock"(\1) : (index) -> ()'),
    # mlir-opt cannot look up a call's function through operations that it does not know.
    (r"func\.call @\w+\((.*)\) : (.*)", r'"kernel.call"(\1) : \2'),
    (r"((?:%\w+ = )?(?:arith|memref)\..*|func\.func private .*)", r"\1"),
]
_LINES = [(re.compile(form), generic) for form, generic in _LINES]
_REGIONS = [(re.compile(form), generic, close) for form, generic, close in _REGIONS]


def generic_form(text):
    """Printed MLIR with the AIE operations in generic form.

    Raises:
        ValueError: a line has none of the forms.
    """
    lines, open_regions = [], []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.strip()
        region = next((region for region in _REGIONS if region[0].fullmatch(words)), None)
        if region is not None:
            lines.append(region[0].sub(region[1], words))
            open_regions.append(region[2])
        elif _CLOSED.fullmatch(words) and open_regions:
            lines.append(open_regions.pop())
        else:
            found = next((form for form in _LINES if form[0].fullmatch(words)), None)
            if found is None:
                raise ValueError(f"line {number} has no form of mlir_aie 1.4.5's dialect: {words}")
            lines.append(found[0].sub(found[1], words))
    return "\n".join(lines)
