# SPDX-License-Identifier: Apache-2.0
"""The split decode layer: its plans for every model, its numbers on the emulator against the operators' references."""

import dataclasses
import re
from dataclasses import dataclass

import numpy as np
import pytest

from flownpu.aie.access_pattern import indices
from flownpu.aie.checker import check
from flownpu.aie.designs.decode_layer import Layer, LayerShape
from flownpu.aie.designs.split_layer import SplitLayer
from flownpu.aie.designs.split_layer_shape import COLUMNS, STREAMS, SplitShape
from flownpu.aie.mlir import to_mlir
from flownpu.aie.plan import DTYPES, Await, Transfer, WriteParameter
from flownpu.selftest.reference.layer import Call, expectation, random_projection
from tests.aie.emulation import emulator, plan_of
from tests.aie.host_kernels import assert_within, bf16
from tests.aie.layer_cases import LayerCase
from tests.aie.mutations import MUTATIONS, caught, ends_that_do_not_wait
from tests.aie.test_decode_layer import SHAPES, SMALL, random_call, without_waiting
from tests.aie.test_designs import prototypes
from tests.aie.test_mlir import needs_mlir_opt, opt

CAPACITY, WINDOW = 320, 64
SENT = {"w_0_0", "vectors", "heads", "tables", "value"}  # one of each name of what the host sends


def split(shape: LayerShape) -> SplitShape:
    return SplitShape(**{field.name: getattr(shape, field.name) for field in dataclasses.fields(shape)})


MODELS = {name: split(shape) for name, shape in SHAPES.items()}
LAYERS = {name: split(shape) for name, shape in SMALL.items() if shape.d != 32}


def call_of(shape, rng, position, layers, **options) -> Call:
    call = random_call(shape, rng, position, layers, **{"capacity": CAPACITY, **options})
    return dataclasses.replace(call, design=SplitLayer(shape))


def run(array, plan, *, seed=0, settle=True, **buffers):
    """As `emulation.call`; the cache's bytes are the cache's memory."""
    held = {}
    for record in plan.sequence.buffers:
        dtype = DTYPES[record.type.dtype]
        if record.name == "cache_bytes":
            held[record.name] = held["cache"].view(np.uint8)
        elif record.name in buffers:
            held[record.name] = np.array(buffers[record.name], dtype).reshape(-1)
        else:
            held[record.name] = np.full(record.type.bytes, 0xFF, np.uint8).view(dtype)
    array.run(plan.sequence, held.values(), seed=seed, settle=settle)
    return held


@dataclass
class SplitCase(LayerCase):
    """A call and what must come out."""

    def check(self, array=None, *, seed=0, settle=True):
        own = array is None
        array = emulator(self.plan.array) if own else array
        found = run(array, self.plan, seed=seed, settle=settle, **self.call.buffers())
        outcome = self.call.outcome(found)
        for name, (expected, tolerance) in self.expected.items():
            assert_within(outcome[name], expected, tolerance)
        if own:
            assert array.leftovers() == []
        return found


def case_of(call, rng) -> SplitCase:
    return SplitCase(plan_of(call.program()), call, expectation(call, rng))


# --- Plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("position", "chunks", "window"), [(0, 128, None), (16, 128, 512), (1022, 128, 512), (32767, 4096, None)]
)
def test_passes_the_checker(name, position, chunks, window):
    shape = MODELS[name]
    plan = SplitLayer(shape).program(position, chunks * shape.keys, layers=[Layer(window)]).resolve_program("layer")
    assert [str(violation) for violation in check(plan)] == []


@pytest.mark.parametrize("name", ["gemma3-1b", "qwen3-0.6b"])
def test_calls_do_not_change_the_array(name):
    design, keys = SplitLayer(MODELS[name]), MODELS[name].keys
    arrays = [
        design.program(position, capacity * keys, **options).resolve_program("layer").array
        for position, capacity, options in [
            (0, 64, {}),
            (700, 128, {"layers": [Layer(512, 1), Layer()], "tables": 2}),
            (5, 64, {"vocabulary": 4096, "epsilon": 1e-5, "scale": 1.0}),
        ]
    ]
    assert arrays[0] == arrays[1] == arrays[2]


def test_a_layer_waits_seven_times():
    """A wait: a drain is awaited before something that reads what it wrote is sent."""
    plan = SplitLayer(MODELS["gemma3-1b"]).program(700, 1280).resolve_program("layer")
    drained = {fifo.name for fifo in plan.array.fifos if any(end.tile.row == 0 for end in fifo.consumers)}
    transfers, waits, waiting = {}, 0, False
    for step in plan.sequence.steps:
        if isinstance(step, Transfer):
            transfers[step.name] = step.fifo
            # Weights and keys are early, or late, and read nothing that was awaited just now.
            reads = step.fifo not in drained and not step.fifo.startswith("w_")
            waits += waiting and reads
            waiting = waiting and not reads
        elif isinstance(step, Await) and transfers[step.transfer] in drained - {"hidden"}:
            waiting = True
    assert waits + waiting == 7


def test_kernels_are_those_of_the_header():
    known = prototypes()
    for name in ("gemma3-1b", "llama3.2-1b", "qwen3-0.6b"):
        for kernel in SplitLayer(MODELS[name]).program(0, 1280).resolve_program("layer").array.kernels:
            assert known[kernel.entry] == [(kind.dtype, kind.shape != ()) for kind in kernel.arguments]


@needs_mlir_opt
@pytest.mark.parametrize("name", ["gemma3-1b", "llama3.1-8b"])
def test_mlir_opt_parses_it(name):
    done = opt(to_mlir(SplitLayer(MODELS[name]).program(600, 1280, vocabulary=4096).resolve_program("layer")))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: split(LayerShape(288, 4, 2, 32, 544, "swiglu")), "a head size that divides 1280 and 768"),
        (lambda: split(LayerShape(1280, 10, 1, 128, 544, "swiglu")), "8 query heads or fewer a KV head"),
        (lambda: SplitLayer(MODELS["gemma3-1b"]).program(0, 1024), "a capacity in multiples of 10"),
        (lambda: SplitLayer(MODELS["gemma3-1b"]).program(1280, 1280), "got position 1280 of 1280"),
        (lambda: SplitLayer(MODELS["gemma3-1b"]).program(0, 1280, layers=[]), "expected one layer or more"),
    ],
)
def test_what_it_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", ["gemma3-1b", "gemma3-4b", "llama3.2-1b", "qwen3-8b"])
@pytest.mark.parametrize(("position", "window"), [(0, None), (95, None), (700, 512), (1279, None)])
def test_every_key_has_one_tile(name, position, window):
    """Follow the cache's bytes: every key of a KV head that is seen is in one object, which its tile takes for it."""
    shape = MODELS[name]
    plan = SplitLayer(shape).program(position, 1280, layers=[Layer(window)]).resolve_program("layer")
    words = {(s.buffer, s.index): s.value for s in plan.sequence.steps if isinstance(s, WriteParameter)}
    first_seen = max(0, position - window + 1) if window else 0
    keys, line = shape.keys_of_object, 2 * shape.position_size
    seen = {(head, key): 0 for head in range(shape.kv_heads) for key in range(first_seen, position + 1)}
    for column in range(COLUMNS):
        for stream in range(STREAMS // COLUMNS):
            taps = [
                step.tap
                for step in plan.sequence.steps
                if isinstance(step, Transfer) and (step.fifo, step.buffer) == (f"w_{column}_{stream}", "cache_bytes")
            ]
            moved = np.concatenate([indices(tap.walk, tap.offset) for tap in taps]) if taps else np.zeros(0, int)
            # Objects of the stream: [keys, values][tile][positions of an object][bytes of d].
            objects = moved.reshape(-1, 2, 2, keys, 2 * shape.d)
            for place in range(2):
                share = f"share_tile_{column}_{2 * stream + place}_parameters"
                count, first, step = (words.get((share, index), 0) for index in (0, 2, 8))
                assert len(objects) == count * shape.kv_heads
                for number, (of_keys, of_values) in enumerate(objects[:, :, place]):
                    head, turn = divmod(number, count)
                    for offset in range(keys):
                        key = first + turn * step + offset
                        begin = key * line + head * 4 * shape.d
                        np.testing.assert_array_equal(of_keys[offset], begin + np.arange(2 * shape.d))
                        np.testing.assert_array_equal(of_values[offset], begin + 2 * shape.d + np.arange(2 * shape.d))
                        if (head, key) in seen:
                            seen[head, key] += 1
    assert set(seen.values()) == {1}


# --- Numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("position", "window"), [(0, WINDOW), (319, None)])
def test_numbers(rng, name, position, window):
    """The first token, and the last of the cache."""
    case_of(call_of(LAYERS[name], rng, position, [Layer(window)]), rng).check()


@pytest.mark.parametrize(("name", "position"), [("gemma3, one KV head", 200), ("llama, three KV heads", 40)])
def test_windows(rng, name, position):
    """Beyond the window, and within it."""
    window = WINDOW
    case_of(call_of(LAYERS[name], rng, position, [Layer(window)]), rng).check()


@pytest.mark.parametrize("name", ["gemma3, one KV head", "llama, eight KV heads"])
def test_layers_and_head_in_one_call(rng, name):
    """Layers that differ in window and table; the second adds the first's update, the head adds the last's."""
    shape = LAYERS[name]
    call = call_of(shape, rng, 130, [Layer(WINDOW), Layer(None, 1), Layer(32)], tables=2)
    norms = bf16(rng.uniform(0.5, 1.5, (shape.entry_norms, shape.hidden)))
    head = random_projection(rng, 1056, shape.hidden)
    call = dataclasses.replace(call, final_norms=norms, head=head, vocabulary=1056, scale=0.2)
    case_of(call, rng).check()


def test_calls_one_after_the_other(rng):
    """One array, without reset, also where a call begins while cores are still at the end of the one before."""
    shape = LAYERS["llama, three KV heads"]
    cases = [case_of(call_of(shape, rng, position, [Layer(WINDOW)]), rng) for position in (3, 319, 0)]
    array = emulator(cases[0].plan.array)
    for case in (*cases, *cases):
        case.check(array)
        case.check(array, settle=False)
    assert array.leftovers() == []


@pytest.mark.parametrize("name", ["gemma3, four KV heads", "llama, three KV heads"])
def test_every_schedule_gives_the_same_bytes(rng, name):
    call = call_of(LAYERS[name], rng, 130, [Layer(WINDOW), Layer()])
    plan, buffers = plan_of(call.program()), call.buffers()
    array = emulator(plan.array)
    first = run(array, plan, **buffers)
    for seed in range(1, 61):
        found = run(array, plan, seed=seed, **buffers)
        assert all(found[key].tobytes() == first[key].tobytes() for key in ("state", "cache")), f"schedule {seed}"
    assert array.leftovers() == []


@pytest.mark.parametrize("name", ["gemma3-1b", "qwen3-0.6b"])
def test_layers_of_models(rng, name):
    """One layer at its size, beyond a window; the other models' pass, too, and take longer."""
    case_of(call_of(MODELS[name], rng, 600, [Layer(512)], capacity=640), rng).check()


# --- Mistakes planted in the design are caught ------------------------------------------------------------------------


def mistaken_case(rng):
    """A layer beyond its window, in which every stream has something to say."""
    return case_of(call_of(LAYERS["gemma3, four KV heads"], rng, 310, [Layer(256)]), rng)


# What changes nothing that counts, and why.
EQUIVALENT = {
    r"tile_\d_\d_parameters\[3\]": "the first phase has no gated row groups, and does not look",
    r"share_tile_\d_\d_parameters\[3\]": "the key after the last is hidden as one of the future, too",
    r"share_tile_\d_\d_parameters\[[57]\]": "there is one query, which sees no later key: the words are FlowKV's",
    r"share_tile_\d_\d_parameters\[8\]": "each tile has one object: there is none after it",
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_planted_mistakes_are_caught(rng, mutation):
    case = mistaken_case(rng)
    sent = {step.name for step in case.plan.sequence.steps if isinstance(step, Transfer) and step.fifo in SENT}
    for text, mutant in mutation(case.plan):
        # A fill may be freed where a drain of its data was awaited: the checker knows when.
        known = mutation is ends_that_do_not_wait and text in sent
        if not known and not any(re.match(name, text) for name in EQUIVALENT):
            assert caught([case], mutant), text


@pytest.mark.parametrize(
    "fifos", [("key", "value_line", "queries"), ("y_0", "y_1", "y_2", "y_3", "y_4", "y_5")], ids=str
)
def test_what_is_not_waited_for_is_caught(rng, fifos):
    """Some schedule reads main memory before it is written, which the checker does not look for."""
    case = mistaken_case(rng)
    hasty = without_waiting(case.plan, fifos)
    assert check(hasty) == []

    def results(plan):
        """What twenty schedules give: bytes, or a deadlock."""
        found = set()
        for seed in range(20):
            try:
                found.add(hash(run(emulator(plan.array), plan, seed=seed, **case.call.buffers())["state"].tobytes()))
            except RuntimeError:
                found.add("deadlock")
        return found

    assert len(results(case.plan)) == 1
    assert results(hasty) != results(case.plan)
