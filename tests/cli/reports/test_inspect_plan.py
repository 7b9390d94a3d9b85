# SPDX-License-Identifier: Apache-2.0
"""`flownpu inspect PLAN`: its counts, counted by hand; its drawings and files; invalid plans."""

import dataclasses
import json
from xml.etree import ElementTree as ET

import pytest

from flownpu.aie.plan.as_json import to_json
from flownpu.aie.plan.data import Acquire, Await, Transfer
from tests.aie.small_programs import chain, with_body, with_end, with_steps


@pytest.fixture
def plan(tmp_path):
    """The file of a small plan: host -> a -> memory tile -> b -> core -> c -> host, 4 objects of 64 words."""
    return write(tmp_path / "chain.json", chain())


def write(file, content):
    file.write_text(to_json(content))
    return file


def test_plan_numbers_equal_plan(flownpu, plan):
    done = flownpu("inspect", plan, "--json")
    assert done.code == 0
    found = json.loads(done.out)
    assert (found["name"], found["target"], found["valid"], found["violations"]) == ("chain", "npu2", True, [])
    shim, memory, compute = found["tiles"]
    assert [(use["kind"], use["tile"]) for use in found["tiles"]] == [
        (kind, {"column": 0, "row": row}) for row, kind in enumerate(("shim", "memory", "compute"))
    ]
    # Two objects of 64 words for each of b and c, the stack, 16 words of parameters, a counter's word for each end.
    assert compute["memory"] == {"used": 2 * 256 + 2 * 256 + 1024 + 64 + 2 * 4, "available": 65536}
    assert memory["memory"] == {"used": 2 * 256, "available": 524288}  # a and b share the link's two objects
    assert (compute["kernels"], memory["kernels"]) == (["scale"], [])
    for use, channels in ((shim, 2), (memory, 6), (compute, 2)):
        assert use["input_channels"] == use["output_channels"] == {"used": 1, "available": channels}
    assert memory["descriptors"] == {"used": 4, "available": 48}  # two objects, each with an input and an output
    assert compute["descriptors"] == {"used": 4, "available": 16}
    assert shim["descriptors"] == {"used": 2, "available": 16}  # one for the fill and one for the drain
    assert compute["locks"] == {"used": 2 + 2 + 1, "available": 16}  # a pair for b, a pair for c, and the barrier
    fifo = found["fifos"][[f["name"] for f in found["fifos"]].index("b")]
    assert (fifo["bytes"], fifo["depths"], fifo["shared_memory"]) == (256, [2, 2], False)
    assert found["sequence"]["bytes"] == {"read": 4 * 256, "written": 4 * 256}


def test_text_report_has_rows(flownpu, plan):
    done = flownpu("inspect", plan)
    assert (done.code, done.err) == (0, "")
    for text in (
        "Plan chain for npu2", "compute (0, 2)", "scale", "2,120 of 65,536 B (3 %)", "512 of 524,288 B (0 %)",
        "2 transfers, 1 awaits, 1 frees, 1 run-time parameters, 1 starts; 1.0 KiB read, 1.0 KiB written",
        "The checker finds nothing wrong.",
    ):  # fmt: skip
        assert text in done.out


def test_plan_is_drawn(flownpu, plan, tmp_path):
    done = flownpu("inspect", plan, "--svg", tmp_path / "chain.svg")
    assert (done.code, done.err) == (0, f"{tmp_path / 'chain.svg'}: the array\n")
    root = ET.fromstring((tmp_path / "chain.svg").read_text())  # noqa: S314 our own text
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "compute (0, 2)" in {element.text for element in root.iter()}


def test_plan_beyond_limits_fails(flownpu, tmp_path):
    file = write(tmp_path / "deep.json", with_end(chain(), "c", "produce", depth=300))
    done = flownpu("inspect", file)
    assert (done.code, done.err) == (1, "")
    assert "[compute tile (0, 2)] memory: need " in done.out
    assert "compute (0, 2)" in done.out, "the tables help to see why"
    assert json.loads(flownpu("inspect", file, "--json").out)["valid"] is False
    # It can be drawn for inspection.
    assert flownpu("inspect", file, "--svg", tmp_path / "deep.svg").code == 1
    assert (tmp_path / "deep.svg").is_file()


def test_inconsistent_plan_fails(flownpu, tmp_path):
    def of_no_fifo(body):
        return [dataclasses.replace(s, fifo="zz") if isinstance(s, Acquire) else s for s in body]

    wrong = with_body(chain(), of_no_fifo)
    missing = dataclasses.replace(
        wrong, array=dataclasses.replace(wrong.array, fifos=tuple(f for f in wrong.array.fifos if f.name != "a"))
    )
    file = write(tmp_path / "wrong.json", missing)
    done = flownpu("inspect", file, "--svg", tmp_path / "wrong.svg")
    assert done.code == 1
    assert "The checker finds" in done.out
    assert "cannot be drawn: " in done.err
    assert not (tmp_path / "wrong.svg").exists()


def test_descriptors_of_shim_are_most_at_once(flownpu, tmp_path):
    """One fill after the other needs one descriptor, whatever their number."""
    plan = chain()
    fill, drain = (step for step in plan.sequence.steps if isinstance(step, Transfer))
    others = [step for step in plan.sequence.steps if not isinstance(step, (Transfer, Await))]
    half = dataclasses.replace(fill.tap, walk=(dataclasses.replace(fill.tap.walk[-1], size=128),))
    fills = [
        dataclasses.replace(fill, name=f"fill{number}", token=True, tap=dataclasses.replace(half, offset=number * 128))
        for number in range(2)
    ]
    others = [step for step in others if type(step).__name__ != "Free"]
    steps = [*others, drain, fills[0], Await("fill0"), fills[1], Await("fill1"), Await(drain.name)]
    found = json.loads(flownpu("inspect", write(tmp_path / "turns.json", with_steps(plan, *steps)), "--json").out)
    assert found["violations"] == []
    assert found["tiles"][0]["descriptors"]["used"] == 2


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("absent.json", None, "no such file"),
        ("manifest.json", '{"format": 1}', "is no plan ([plan] expected an object of a plan, got one of kind None)"),
        ("text.json", "not JSON", "is no plan (Expecting value"),
        ("part.json", '{"kind": "Tile", "column": 0, "row": 0}', "is no plan ([plan] expected a Plan, got Tile)"),
    ],
)
def test_file_without_plan_is_refused(flownpu, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_text(content)
    done = flownpu("inspect", tmp_path / name)
    assert (done.code, done.out) == (1, "")
    assert words in done.err


def test_plan_for_unknown_chip_is_refused(flownpu, tmp_path):
    plan = chain()
    file = write(
        tmp_path / "npu3.json", dataclasses.replace(plan, array=dataclasses.replace(plan.array, target="npu3"))
    )
    assert "is a plan for npu3: expected npu1 or npu2" in flownpu("inspect", file).err


@pytest.mark.parametrize(
    ("path", "option", "words"),
    [
        ("plan", ["--check"], "--check: is for models, not for plans"),
        ("model", ["--svg", "x.svg"], "--svg: is for plans (.json files), not for models"),
    ],
)
def test_options_of_other_kind_are_refused(flownpu, request, path, option, words):
    done = flownpu("inspect", request.getfixturevalue(path), *option)
    assert done.code == 2
    assert words in done.err
