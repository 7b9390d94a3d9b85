# SPDX-License-Identifier: Apache-2.0
"""`flownpu predict`, and its cost model compared with published tables."""

import json
from collections.abc import Iterator
from functools import cache

import pytest
import typer

from flownpu.aie.cost.chips import CHIPS
from flownpu.aie.cost.parameters import VALUES
from flownpu.cli.predict import parse_contexts
from flownpu.model.shapes import SHAPES
from flownpu.npu.layers import read_decoder
from flownpu.predict import prices
from flownpu.predict.measured_parameters import measured_values
from flownpu.predict.prices import Prediction
from flownpu.predict.published import CONTEXTS, TABLES, Role, watts
from flownpu.predict.published.implementation import image_seconds, prompt_seconds, token_seconds
from flownpu.predict.target import known, target
from flownpu.predict.validation import ERRORS, summary, validate
from flownpu.selftest.outcome import Outcome
from flownpu.selftest.report import SelftestReport
from flownpu.selftest.runner import StageResult

DEVICE = CHIPS["kraken-350"]


@pytest.fixture(scope="module", autouse=True)
def _programs_are_made_once() -> Iterator[None]:
    """Keeps the programs of all models, not of the last four: writing those of gemma3-4b takes eight seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("predicted_programs", "_published_prices"):
            patch.setattr(prices, name, cache(getattr(prices, name).__wrapped__))
        yield


# --- The command ------------------------------------------------------------------------------------------------------


def test_table_fits_80_columns(flownpu):
    done = flownpu("predict", "gemma3-4b", "--context", "1k,...,2k")
    assert done.code == 0, done.err
    assert "Predicted, not measured" in done.out
    rows = [line.split()[0] for line in done.out.splitlines() if line.split()[:1] and line.split()[0] in ("1k", "2k")]
    assert rows == ["1k", "2k"] * 2  # a prompt's, and a token's
    assert "14.4 a, 18.2 b" in done.out  # the papers', and FastFlowLM's
    assert "a: papers; arXiv 2602.06063" in done.out
    assert "b: FastFlowLM 0.9.20" in done.out
    assert "first token after" in done.out
    assert "…" not in done.out  # nothing is cut
    assert all(len(line) <= 80 for line in done.out.splitlines() if line.startswith(" "))


def test_json_equals_prediction(flownpu):
    done = flownpu("predict", "llama3.2-1b", "--context", "1k,100", "--json")
    document = json.loads(done.out)
    assert document["predicted"] is True
    assert (document["model"], document["device"]) == ("llama3.2-1b", "kraken-350")
    assert [point["context"] for point in document["points"]] == [1024, 100]
    first = document["points"][0]
    assert first["decode_tokens_per_second"] == pytest.approx(1 / sum(first["decode_parts"].values()))
    assert first["ttft_seconds"] == pytest.approx(sum(first["ttft_parts"].values()))
    assert first["prefill_tokens_per_second"] == pytest.approx(1024 / first["ttft_seconds"])
    assert first["read_bytes_per_second"] < VALUES["memory_read"]
    assert first["ttft_parts"]["changes of array"] == pytest.approx(first["ttft_changes"] * VALUES["array_change"])
    # Table II: 1.57 W of the NPU and 0.07 W of the CPU.
    assert first["decode_joules"] == pytest.approx(1.64 / first["decode_tokens_per_second"])
    assert first["published"]["decode"] == {
        "llama-decode": 36.7, "flm-llama-decode": 64.5, "flm-llama-decode-0.9.8": 41.5,
    }  # fmt: skip
    assert document["tables"]["flm-llama-decode-0.9.8"]["label"] == "FastFlowLM 0.9.8"
    assert 0 < document["errors"]["ttft"] < 0.2


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["gema3-4b"], 1, "no such model, folder or file: gema3-4b; did you mean gemma3-4b"),
        (["zzz"], 1, "known are gemma3-1b"),
        (["gemma3-1b", "--device", "kraken350"], 2, "did you mean kraken-350"),
        (["gemma3-1b", "--context", "64k"], 1, "contexts of 1 to 32768 tokens"),
        (["gemma3-1b", "--context", "many"], 2, "expected lengths such as 1k,2k,...,32k, got 'many'"),
        (["gemma3-1b", "--measured", "no-such.json"], 1, "no-such.json: expected a JSON file of measured parameters"),
    ],
)
def test_predict_with_unfit_arguments_is_refused(flownpu, arguments, code, message):
    done = flownpu("predict", *arguments)
    assert done.code == code
    assert message in " ".join(done.err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("1k", [1024]),
        ("1k,2k,...,16k", [1024, 2048, 4096, 8192, 16384]),
        ("100,...,1000", [100, 200, 400, 800, 1000]),
        ("512, 1K", [512, 1024]),
    ],
)
def test_lengths_are_predicted(text, lengths):
    assert parse_contexts(text) == lengths


@pytest.mark.parametrize("text", ["...,1k", "1k,...", "1k,...,...,4k", "0", "1.5k", ""])
def test_impossible_lengths_are_refused(text):
    with pytest.raises(typer.BadParameter, match="expected"):
        parse_contexts(text)


# --- Measured parameters ----------------------------------------------------------------------------------------------


def test_measured_parameters_replace_published_ones(flownpu, tmp_path):
    """With streams slower than memory, reading weights takes twice as long at half the streams' rate."""
    file = tmp_path / "measured.json"
    arguments = ["predict", "qwen3-0.6b", "--context", "100", "--json", "--measured", file]
    seconds = []
    for rate in (VALUES["channel_read"] / 4, VALUES["channel_read"] / 8):
        file.write_text(json.dumps({"channel_read": rate, "wait": VALUES["wait"]}))
        found = json.loads(flownpu(*arguments).out)
        assert found["measured"] == {"channel_read": rate}
        seconds.append(found["points"][0]["decode_parts"]["decode_layer: weights"])
    before, after = seconds
    assert after == pytest.approx(2 * before, rel=0.01)


def test_measured_parameters_of_selftest_are_used(tmp_path):
    """The report's "measured" is used. The emulator's is empty, so published parameters stay."""
    measured = {"channel_read": VALUES["channel_read"] / 2}
    for device, found in (("npu", measured), ("emulate", {})):
        results = [StageResult("copy", Outcome.PASSED)]
        document = SelftestReport(device, "npu2", {}, results).document() | {"measured": found}
        (tmp_path / "report.json").write_text(json.dumps(document))
        assert measured_values(tmp_path / "report.json") == {**VALUES, **found}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "expected an object of parameters"),
        ('{"measured": [1]}', "expected 'measured' to be an object of parameters"),
        ('{"measured": {"chanel_read": 1}}', "'chanel_read' is no parameter of the cost model"),
        ("{", "expected a JSON file"),
        ('{"chanel_read": 1}', "'chanel_read' is no parameter of the cost model; did you mean channel_read"),
        ('{"wait": "3 us"}', "expected wait to be a positive number of s, got '3 us'"),
        ('{"wait": true}', "expected wait to be a positive number"),
        ('{"wait": 0}', "expected wait to be a positive number"),
        ('{"wait": NaN}', "expected wait to be a positive number"),
    ],
)
def test_unfit_measured_parameters_are_refused(flownpu, tmp_path, text, message):
    file = tmp_path / "measured.json"
    file.write_text(text)
    done = flownpu("predict", "gemma3-1b", "--measured", file)
    assert done.code == 1
    assert message in done.err


# --- What is predicted ------------------------------------------------------------------------------------------------


def test_configuration_gives_known_decoder(tmp_path):
    folder = tmp_path / "of-hugging-face"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES["qwen3-0.6b"]))
    for path in (folder, folder / "config.json"):
        assert target(str(path)).decoder == known("qwen3-0.6b").decoder
        assert target(str(path)).name == "of-hugging-face"


def test_int8_cache_of_configuration_is_predicted(flownpu, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-0.6b"]))
    for text in ("qwen3-0.6b", str(tmp_path)):
        assert target(text, int8_cache=True).decoder == known("qwen3-0.6b", int8_cache=True).decoder
    rates = [
        json.loads(flownpu("predict", "qwen3-0.6b", "--context", "1k", "--json", *given).out)["points"][0]
        for given in ((), ("--kv-dtype", "int8"))
    ]
    assert rates[0]["decode_tokens_per_second"] < rates[1]["decode_tokens_per_second"]
    # The roofs' bytes by hand: 28 layers, 1024 positions of 8 KV heads, rows of 256 bytes or 160.
    saved = VALUES["memory_read"] * (1 / rates[0]["roof"] - 1 / rates[1]["roof"])
    assert saved == pytest.approx(28 * 1024 * 8 * 2 * (256 - 160))


def test_weights_of_eight_bits_are_predicted(flownpu):
    rates = [
        json.loads(flownpu("predict", "qwen3-0.6b", "--context", "100", "--json", *given).out)["points"][0]
        for given in ((), ("--weights", "8/4/4"), ("--weights", "q8"))
    ]
    # The roofs' bytes by hand: two planes instead of one of blocks of 5120 bytes, for 32 rows x 256 columns each; of 28
    # layers QKV 4096 x 1024 and output 1024 x 2048; then gate, up and down 3072 x 1024 and the head 151936 x 1024, too.
    attention = 28 * (4096 * 1024 + 1024 * 2048)
    others = 28 * 3 * 3072 * 1024 + 151936 * 1024
    for rate, weights in zip(rates[1:], (attention, attention + others), strict=True):
        more = VALUES["memory_read"] * (1 / rate["roof"] - 1 / rates[0]["roof"])
        assert more == pytest.approx(weights * 5120 / (32 * 256))
        assert rate["decode_tokens_per_second"] < rates[0]["decode_tokens_per_second"]


def test_bits_of_graph_are_refused(flownpu, model):
    done = flownpu("predict", model, "--weights", "q8")
    assert done.code == 1
    assert "expected no bits of weights for a graph, which has its own" in done.err


def test_int8_cache_of_graph_in_bf16_is_refused(flownpu, model):
    done = flownpu("predict", model, "--kv-dtype", "int8")
    assert done.code == 1
    assert "expected a KV cache in int8, got another: convert with --kv-dtype int8" in done.err


def test_converted_model_gives_decoder_of_session(model):
    assert target(str(model)).decoder == read_decoder(model)
    assert target(str(model / "genai_config.json")).decoder == read_decoder(model)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "expected a folder with genai_config.json, model.onnx or config.json"),
        ({"config.json": "{"}, "config.json"),
        ({"config.json": '{"model_type": "mamba"}'}, "expected model_type to be one of"),
        ({"config.json": json.dumps({**SHAPES["llama3.2-1b"], "hidden_size": 2050})}, "no place"),
    ],
)
def test_unknown_targets_are_refused(flownpu, tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    done = flownpu("predict", tmp_path)
    assert done.code == 1
    assert message in done.err


def test_token_reads_weights_and_visible_keys():
    """Bytes by hand: all weights, and for each layer the keys and values in its window, in whole chunks."""
    of = known("gemma3-4b")
    context = 2048  # beyond the windows of 1024
    prediction = Prediction(of, context, DEVICE, VALUES)
    shape = of.decoder.shape
    keys = sum(min(window or context, context) for window in of.decoder.windows)
    weights = len(of.decoder.windows) * shape.weight_bytes() + of.decoder.head.bytes
    least = weights + keys * shape.kv_heads * 2 * shape.d * 2
    # Keys are dealt to 24 tiles in rounds; each tile gets as many bytes as a Q4NX block has. A window that begins or
    # ends within a round reads all of it, so there may be two more rounds. x, norms and the state are read, too.
    chunks = len(of.decoder.windows) * 2 * 24 * (1280 // shape.d) * shape.kv_heads * 2 * shape.d * 2
    assert least <= prediction.token(context).read_bytes <= least + chunks + 0.01 * weights
    assert prediction.roof(context) == pytest.approx(VALUES["memory_read"] / least)


def test_roof_of_mixture_reads_chosen_experts_alone():
    """A token reads 8 of Qwen3-30B-A3B's 128 experts: 1.9 GB of Q4NX weights in all, and keys."""
    layer = 2048 * (32 + 2 * 4) * 128 + 32 * 128 * 2048 + 8 * 3 * 768 * 2048
    weights = 48 * layer + 151936 * 2048
    least = weights * 5120 / (32 * 256) + 1024 * 48 * 4 * 2 * 128 * 2
    found = Prediction(known("qwen3-30b-a3b"), 1024, DEVICE, VALUES).roof(1024)
    assert found == pytest.approx(VALUES["memory_read"] / least)


def test_image_takes_encoder_and_prompt():
    prediction = Prediction(known("gemma3-4b"), 2048, DEVICE, VALUES)
    assert prediction.image().total > prediction.prompt(272).total
    assert Prediction(known("gemma3-1b"), 1024, DEVICE, VALUES).image() is None


# --- Published tables -------------------------------------------------------------------------------------------------


def test_tables_name_their_source():
    for table in TABLES.values():
        assert table.source
        assert table.read
        assert table.device in CHIPS
        assert table.quantity in {"decode", "prefill", "ttft", "vision_ttft"}
        for model, values in table.values.items():
            assert len(values) <= len(CONTEXTS)
            assert known(model).decoder


def test_llama_numbers_equal_table_i():
    """Figure 8 is printed without numbers; table I has its ratios to three backends, whose numbers are below.

    The ratios are rounded to 0.1, so they are compared to 0.15, or 5 %.
    """
    others = {  # SOTA NPU at 1k and 2k, iGPU, CPU, as the same page prints them
        "llama3.2-1b": ((18.6, 14.9), (28.7, 19.0, 10.9, 6.0, 3.2, 1.6), (54.6, 52.6, 42.3, 34.1, 24.4, 14.8)),
        "llama3.2-3b": ((9.0, 6.1), (23.2, 18.8, 14.0, 9.2, 5.5, 3.0), (22.6, 21.3, 17.5, 14.1, 9.4, 6.1)),
        "llama3.1-8b": ((6.3, 4.6), (11.3, 9.9, 7.7, 5.4, 3.4, 1.9), (10.3, 7.7, 7.6, 6.7, 5.8, 3.3)),
    }
    table_i = {
        "llama3.2-1b": ((2.0, 2.4), (1.3, 1.9, 3.0, 4.9, 7.6, 10.8), (0.7, 0.7, 0.8, 0.9, 1.0, 1.2)),
        "llama3.2-3b": ((1.8, 2.5), (0.7, 0.8, 1.0, 1.4, 1.8, 2.3), (0.7, 0.7, 0.8, 0.9, 1.1, 1.2)),
        "llama3.1-8b": ((1.2, 1.6), (0.7, 0.8, 0.9, 1.2, 1.7, 2.3), (0.7, 1.0, 0.9, 1.0, 1.0, 1.3)),
    }
    for model, ours in TABLES["llama-decode"].values.items():
        for theirs, ratios in zip(others[model], table_i[model], strict=True):
            for value, other, ratio in zip(ours, theirs, ratios, strict=False):
                assert value / other == pytest.approx(ratio, abs=0.15, rel=0.05)


# --- The papers' implementation ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report():
    return validate()


@pytest.mark.parametrize("table", ERRORS)
def test_published_table_is_predicted_within_bounds(report, table):
    """Off by at most 15 % on average, 10 % for decoding; a table that was fitted to is no worse than when left out.

    Times to the first token that nothing was fitted to (Llama's with FastFlowLM 0.9.8, heads of 64 and 128) are off by
    10 % or less.
    """
    average, worst = summary(report[table])
    role, quantity = TABLES[table].role, TABLES[table].quantity
    if role is Role.HELD_OUT:
        assert average == pytest.approx(ERRORS[table], abs=1e-3)
        assert average <= 0.10
    else:
        assert average <= ERRORS[table] + 0.005
    if len(report[table]) > 1:
        assert average <= (0.10 if quantity == "decode" else 0.15)
        assert worst <= 0.35


def test_tables_before_later_software_are_validated(report):
    assert set(report) == set(ERRORS) == {table.name for table in TABLES.values() if table.role is not Role.LATER}


def test_longer_context_costs_bytes_of_keys():
    """Beyond all windows, five layers of Gemma3-4B read more keys: 4 KV heads of 256, a pair of streams each."""
    decoder = known("gemma3-4b").decoder
    short, long = (token_seconds(decoder, n, DEVICE, VALUES) for n in (65536, 131072))
    efficiency = (512 / (512 + 12)) / (5120 / (5120 + 12))
    assert long - short == pytest.approx(65536 * 5 * 1024 / (2 * VALUES["channel_read"] * efficiency))


def test_idle_tiles_do_not_shorten_time():
    """Each of eight KV heads has a column of four tiles: three query heads take as long as four."""
    three, four = (known(name).decoder for name in ("llama3.2-3b", "llama3.1-8b"))
    beyond = [
        (prompt_seconds(of, 32768, DEVICE, VALUES) - 2 * prompt_seconds(of, 16384, DEVICE, VALUES)) / len(of.windows)
        for of in (three, four)
    ]
    assert beyond[0] == pytest.approx(beyond[1], rel=0.02)


def test_prompts_and_images_take_longer_than_their_parts():
    of = known("gemma3-4b")
    times = [prompt_seconds(of.decoder, tokens, DEVICE, VALUES) for tokens in (512, 1024, 8192)]
    assert times == sorted(times)
    assert image_seconds(of.decoder, of.encoder, DEVICE, VALUES) > prompt_seconds(of.decoder, 272, DEVICE, VALUES)


def test_power_equals_published_one():
    assert watts("gemma3-4b", "prefill") == pytest.approx(4.5)
    assert watts("qwen3-4b", "decode") is None


# --- Operators alone --------------------------------------------------------------------------------------------------


def test_weights_and_keys_of_gemma4_are_those_of_its_card():
    """Multiply-adds of a token counted by hand: feed-forwards, attention, each layer's embedding, the LM head."""
    decoder = known("gemma4-e2b").decoder
    assert sum(weight.size for weight in decoder.products) == pytest.approx(1557e6 + 278e6 + 41e6 + 403e6, rel=5e-3)
    # 28 layers of 512 keys of 256 elements, 7 of all keys of 512; in bf16, values as well.
    assert decoder.cache_bytes(4096) == 4 * (28 * 512 * 256 + 7 * 4096 * 512)


def test_token_by_operators_changes_no_array_and_is_below_roof(flownpu):
    done = flownpu("predict", "gemma4-e2b", "--context", "1k", "--json")
    assert done.code == 0, done.err
    (point,) = json.loads(done.out)["points"]
    assert 0.5 * point["roof"] < point["decode_tokens_per_second"] < point["roof"]
    assert "changes of array" not in point["decode_parts"]
    assert point["decode_parts"]["dispatches"] > 70 * VALUES["dispatch"]  # the feed-forward's two products of 35 layers
    refused = flownpu("predict", "gemma4-e2b", "--device", "radeon-780m")
    assert "expected layers of one form" in refused.err
