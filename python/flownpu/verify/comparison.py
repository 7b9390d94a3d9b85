# SPDX-License-Identifier: Apache-2.0
"""Compares a model with its source on the same tokens: as a whole, and layer by layer.

A *stage* is the embedding, a layer, or the head (last norm and LM head). Its own error is that of its output when it
starts from the source's hidden states, so that an error shows in the stage that makes it and in no other. An error is
the root of the mean over tokens of (|model - source| / |source|)^2; so are the errors of the whole run, which
accumulate from stage to stage.

A stage's tolerance comes from the arithmetic, and is measured on the same tokens:

    tolerance = weights + roundings

*weights*, if the source is a checkpoint that is not quantised: the stage's *quantisation* is the error of the source's
own output when the stage's weights are rounded to Q4NX, from the same hidden states. A model that `flownpu convert`
made of this checkpoint, as its manifest says, has exactly these weights: its stages are compared with the source's
after that rounding, and `weights` is 0. Any other model may have another 4-bit format: it is allowed 2 x the
quantisation. A format without minima has a step of max |w| / 8, where Q4NX has (max - min) / 15: at most 15 / 8 times
as large.

*weights*, if the source has 4-bit weights: the model must have the same codes, and only its scales may be rounded, to
bf16. Let r be the largest relative error of a weight when the source's graph is rewritten, and m the relative amount by
which inputs are moved below. W (x + dx) and (W + dW) x have errors of the same size, so each of a layer's 4 consecutive
products (query, key and value; output; gate and up; down) is allowed r / m roundings.

*roundings*: the operands of products are rounded, each by at most u (bf16: 2^-8 of itself; int8: 1/254 of the largest
of a group of 32). The effect of one rounding on a stage is measured: its input is moved by random amounts of up to u,
and the change of its output is taken. A product has 2 roundings: of its input, and of its dequantised weights. A layer
has 4 consecutive products, and 2 more roundings: of keys and values, and of queries or probabilities. Their errors are
added as if all had one direction. The head has 1 product. The embedding has none; it is allowed u, for its scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flownpu.errors import FlowNPUError, require
from flownpu.model.folder import MANIFEST, locate_graph, read_json
from flownpu.model.integrity import files_of, sha256
from flownpu.model.onnx_file import load_model, reading
from flownpu.model.tokenizer_file import open_tokenizer
from flownpu.verify.runs import Checkpoint, GraphRun, Run, relative_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

PARAGRAPH = (
    "The harbour was quiet before sunrise. A fisherman mended his nets by the light of a lamp, while gulls waited on "
    "the wall for what he would throw them. Later the market opened: bread, apples, cheese from the hills, and more "
    "noise than anyone needed. A child asked why ships of iron float. Because they are mostly air, said her mother, "
    "and air is lighter than water. The child thought about it, looked at the anchor, and asked why that one did not. "
    "By noon the wind had turned to the west, as the forecast had said, and the first boats came home."
)
_SAME_STEP = 2.0  # times the quantisation, for another format of 4 bits: see the module's docstring
_PRODUCT_ROUNDINGS, _ATTENTION_ROUNDINGS, _LAYER_PRODUCTS = 2, 2, 4
_BFLOAT16, _INT8, _INT8_GROUP = 2.0**-8, 1 / 254, 32
# The KL divergence in nats that 4-bit weights cost the tests' small trained model (docs/performance.md, "Accuracy"). If
# the source has 4-bit weights too, the cost of int8 activations is compared with it.
_COST_OF_WEIGHTS = 1.2e-2


@dataclass(frozen=True)
class Stage:
    """A stage of a model, compared with the source's; all errors are relative.

    Attributes:
        name: "embedding", "layer 0", .., "head".
        error: the stage's own error.
        tolerance: the most that `error` may be.
        from_weights: the part of the tolerance for changes of weights.
        from_roundings: the part of the tolerance for roundings of activations.
        quantisation: the error of the source's output when the stage's weights are rounded to Q4NX; None: the source
            has 4-bit weights.
        accumulated: the error of the whole run up to this stage.
    """

    name: str
    error: float
    tolerance: float
    from_weights: float
    from_roundings: float
    quantisation: float | None
    accumulated: float

    @property
    def diverges(self) -> bool:
        """Whether the stage's own error is beyond its tolerance, or NaN."""
        return not self.error <= self.tolerance


@dataclass(frozen=True)
class Int8Cost:
    """How much rounding activations to int8, FlowNPU's default on a CPU, changes a model's outputs on these tokens.

    Attributes:
        kl_mean: Kullback-Leibler divergence of the next token's distribution with int8 from that with bf16, in nats,
            mean over tokens.
        top1_agreement: share of tokens after which both find the same next token likeliest.
        weights_kl_mean: the divergence of the model with bf16 from its source, which is what 4-bit weights cost it.
            None: the source has 4-bit weights too.
    """

    kl_mean: float
    top1_agreement: float
    weights_kl_mean: float | None

    @property
    def is_large(self) -> bool:
        """Whether int8 costs more than 4-bit weights, or NaN; then the model should run with bf16."""
        accepted = _COST_OF_WEIGHTS if self.weights_kl_mean is None else self.weights_kl_mean
        return not self.kl_mean <= accepted


@dataclass(frozen=True)
class Verification:
    """The report of `flownpu verify`.

    Attributes:
        model: the model's path.
        source: the source's path.
        basis: in words, what the tolerances allow.
        tokens: how many tokens were compared.
        kl_mean: Kullback-Leibler divergence of the next token's distribution in the model from that in the source, in
            nats, mean over tokens.
        kl_largest: the largest such divergence after a token.
        top1_agreement: share of tokens after which both find the same next token likeliest.
        model_perplexity: the model's perplexity on the text.
        source_perplexity: the source's perplexity on the text.
        stages: the stages, from the embedding to the head.
        int8: what int8 activations cost; None: FlowNPU does not run the model.
    """

    model: str
    source: str
    basis: str
    tokens: int
    kl_mean: float
    kl_largest: float
    top1_agreement: float
    model_perplexity: float
    source_perplexity: float
    stages: tuple[Stage, ...]
    int8: Int8Cost | None = None

    @property
    def first_divergence(self) -> Stage | None:
        """The first stage whose own error is beyond its tolerance; None if there is none."""
        return next((stage for stage in self.stages if stage.diverges), None)


def verify(
    model: Path,
    source: Path,
    text: str,
    options: Mapping[str, str] | None,
    *,
    most_tokens: int = 256,
    report: Callable[[str], None] = lambda _: None,
) -> Verification:
    """Runs a model and its source on the same tokens.

    Args:
        model: a folder of a model for ORT GenAI.
        source: a checkpoint folder, or a model folder, which ONNX Runtime's CPU provider runs.
        text: the text to run both on; the model's tokenizer makes tokens of it.
        options: options of FlowNPU's provider for the model, with activations in bf16 unless they say otherwise; None:
            ONNX Runtime's CPU provider runs the model.
        most_tokens: how many of the text's tokens are used at most.
        report: called with a description of what is done next.

    Raises:
        FlowNPUError: one of the two is not a model, they differ in layers or sizes, or the text is too short.
        MissingDependencyError: onnxruntime, or a package of the extras "convert" and "verify", is not installed.
        RuntimeError: ONNX Runtime or the provider refuses the model or an option.
    """
    activations = (options or {}).get("activations", "bf16")
    options = options if options is None else {**options, "activations": activations}
    file, settings = locate_graph(model)
    if "embedding" in settings:
        raise FlowNPUError(
            f"{model} takes pictures, and verify runs text decoders: convert the checkpoint with --vision-weights "
            "none, whose decoder has the same weights, and verify that"
        )
    head_size = int(settings.get("decoder", {}).get("head_size", 0))
    tokens = tokens_of(file.parent, text, min(most_tokens, int(settings.get("context_length", most_tokens))))
    report("running the source")
    if _is_checkpoint(source):
        of_source = _of_checkpoint(source, tokens, report, made_of=is_made_of(file.parent, source))
    else:
        of_source = _of_graph(source, tokens)
    report("running the model")
    whole = GraphRun(file, head_size, options).run(tokens)
    if [state.shape for state in whole.hidden] != [state.shape for state in of_source.run.hidden]:
        raise FlowNPUError(
            f"{source} has {_sizes(of_source.run)}, {model} {_sizes(whole)}: they are not the same model"
        )
    report("running each layer by itself")
    forced = GraphRun(file, head_size, options, forced=True)
    alone = forced.run(tokens, of_source.run.hidden)
    rounding = _INT8 if activations == "int8" else _BFLOAT16
    states = [_moved(state, rounding) for state in of_source.run.hidden]
    moved = _Moved(forced.run(tokens, states), relative_error(states[0], of_source.run.hidden[0]), rounding)
    int8 = None
    if options is not None:
        report("rounding activations in the other way")
        other = {**options, "activations": "bf16" if activations == "int8" else "int8"}
        runs = {activations: whole, other["activations"]: GraphRun(file, head_size, other).run(tokens)}
        int8 = _int8_cost(runs["int8"], runs["bf16"], of_source, tokens)
    return Verification(
        model=str(model),
        source=str(source),
        basis=of_source.basis,
        tokens=len(tokens),
        **_distributions(whole.logits, of_source.run.logits, tokens),
        stages=tuple(_stages(of_source, whole, alone, moved)),
        int8=int8,
    )


def tokens_of(folder: Path, text: str, most: int) -> NDArray[np.int64]:
    """The first `most` tokens of a text, int64 [S], with special tokens, by the folder's tokenizer.json.

    Raises:
        FlowNPUError: there is no tokenizer, or a damaged one, or the text has fewer than two tokens.
        MissingDependencyError: tokenizers is not installed.
    """
    tokenizer = open_tokenizer(folder, extra="verify", purpose="flownpu verify")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokens = np.array(tokenizer.encode(text).ids[:most], np.int64)
    if len(tokens) < 2:
        raise FlowNPUError(f"expected a text of two tokens or more, got {len(tokens)}: nothing would be predicted")
    return tokens


# --- Sources ----------------------------------------------------------------------------------------------------------


def _is_checkpoint(folder: Path) -> bool:
    # An optimum export also has a config.json.
    graph = any((folder / name).is_file() for name in ("genai_config.json", "model.onnx"))
    return not graph and (folder / "config.json").is_file()


@dataclass(frozen=True)
class _Source:
    """The results of a source, and the differences that a model may have from them.

    Attributes:
        run: the source's whole run.
        outputs: for each stage, the output with which the model's is compared.
        quantisation: for each stage, see `Stage.quantisation`.
        from_weights: for each stage, what is allowed for its weights besides `weight_rounding`.
        weight_rounding: the largest relative error of a weight whose scales were rounded.
        basis: in words, what the tolerances allow.
    """

    run: Run
    outputs: list[Floats]
    quantisation: list[float] | list[None]
    from_weights: list[float]
    weight_rounding: float
    basis: str


def is_made_of(folder: Path, checkpoint: Path) -> bool:
    """Whether a model was made of this checkpoint, by its folder's manifest, and the checkpoint is not quantised."""
    manifest = folder / MANIFEST
    source = read_json(manifest).get("source") if manifest.is_file() else None
    if not isinstance(source, dict) or source.get("kind") != "huggingface":
        return False
    files = files_of(source, manifest, "sha256")
    if not files or "quantization_config" in read_json(checkpoint / "config.json"):
        return False
    return all(
        (checkpoint / name).is_file() and sha256(checkpoint / name) == file["sha256"]
        for name, file in files.items()
        if name.endswith(".safetensors")
    )


def _of_checkpoint(folder: Path, tokens: NDArray[np.int64], report: Callable[[str], None], *, made_of: bool) -> _Source:
    checkpoint = Checkpoint(folder)
    run = checkpoint.run(tokens)
    report("quantising the source's weights")
    rounded = _outputs(checkpoint.rounded_outputs(tokens, run))
    errors = [relative_error(output, exact) for output, exact in zip(rounded, _outputs(run), strict=True)]
    if made_of:
        basis = "the model was made of this checkpoint: compared with it after its weights are rounded to Q4NX alike"
        return _Source(run, rounded, errors, [0.0] * len(errors), 0.0, f"{basis}; roundings of activations are allowed")
    basis = (
        "the source is not quantised: 2 x what rounding its weights to Q4NX does to it, and roundings of activations"
    )
    return _Source(run, _outputs(run), errors, [_SAME_STEP * error for error in errors], 0.0, basis)


def _of_graph(folder: Path, tokens: NDArray[np.int64]) -> _Source:
    file, settings = locate_graph(folder)
    graph = GraphRun(file, int(settings.get("decoder", {}).get("head_size", 0)), None)
    if not graph.quantised:
        raise FlowNPUError(
            f"{folder}: its weights are floats, and how far others may be from them is told of a checkpoint only: "
            "give the one that it was exported from"
        )
    outputs = _outputs(run := graph.run(tokens))
    largest = _scale_rounding(file)
    basis = "both have 4-bit weights, which must be the same: roundings of activations"
    if largest:
        basis += f", and of scales to bf16, which move its weights by {100 * largest:.2f} % at most"
    return _Source(run, outputs, [None] * len(outputs), [0.0] * len(outputs), largest, basis)


def _sizes(run: Run) -> str:
    return f"{len(run.hidden) - 1} layers of {run.hidden[0].shape[1]} numbers a token"


def _outputs(run: Run) -> list[Floats]:
    return [*run.hidden, run.logits]


def _scale_rounding(file: Path) -> float:
    """The largest relative error of a weight when a graph is rewritten; 0 if it is rewritten already."""
    require("onnxscript", extra="convert", purpose="flownpu verify")
    from flownpu.graph_rewrites import rewrite  # noqa: PLC0415 needs the extra "convert"
    from flownpu.graph_rewrites.q4nx_tensor import Q4NXTensor  # noqa: PLC0415

    model = load_model(file, purpose="flownpu verify")
    largest = 0.0
    with reading(file):
        rewrite(model)
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, Q4NXTensor):
                tensor.numpy()
                largest = max(largest, tensor.relative_error)
    return largest


# --- Numbers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Moved:
    """A forced run from hidden states with random changes.

    Attributes:
        run: the outputs.
        amount: the relative error of the moved states.
        rounding: u, the largest relative amount.
    """

    run: Run
    amount: float
    rounding: float


def _moved(state: Floats, rounding: float) -> Floats:
    """Hidden states [S, D] in which each number is moved by a random amount, up to its largest rounding error."""
    amounts = np.random.default_rng(0).uniform(-rounding, rounding, state.shape).astype(np.float32)
    if rounding == _BFLOAT16:
        return state * (1 + amounts)
    groups = np.abs(np.pad(state, ((0, 0), (0, -state.shape[1] % _INT8_GROUP)))).reshape(len(state), -1, _INT8_GROUP)
    largest: Floats = np.repeat(groups.max(axis=2), _INT8_GROUP, axis=1)[:, : state.shape[1]]
    return state + amounts * largest


def _stages(source: _Source, whole: Run, alone: Run, moved: _Moved) -> list[Stage]:
    layers = len(source.run.hidden) - 1
    names = ["embedding", *(f"layer {layer}" for layer in range(layers)), "head"]
    runs = [_outputs(run) for run in (whole, source.run, alone, moved.run)]
    stages = []
    for name, expected, quantisation, of_weights, *outputs in zip(
        names, source.outputs, source.quantisation, source.from_weights, *runs, strict=True
    ):
        in_whole, exact, own, shifted = outputs
        if name == "embedding":
            from_roundings, weights_at_once = moved.rounding, source.weight_rounding
        else:
            one = relative_error(shifted, own)  # the effect of one rounding
            products, others = (1, 0) if name == "head" else (_LAYER_PRODUCTS, _ATTENTION_ROUNDINGS)
            from_roundings = (_PRODUCT_ROUNDINGS * products + others) * one
            weights_at_once = products * one * source.weight_rounding / moved.amount
        from_weights = of_weights + weights_at_once
        error, accumulated = relative_error(own, expected), relative_error(in_whole, exact)
        tolerance = from_weights + from_roundings
        stages.append(Stage(name, error, tolerance, from_weights, from_roundings, quantisation, accumulated))
    return stages


def _int8_cost(int8: Run, bf16: Run, source: _Source, tokens: NDArray[np.int64]) -> Int8Cost:
    between = _distributions(int8.logits, bf16.logits, tokens)
    of_weights = None
    if source.quantisation[0] is not None:  # the source's weights are floats
        of_weights = _distributions(bf16.logits, source.run.logits, tokens)["kl_mean"]
    return Int8Cost(between["kl_mean"], between["top1_agreement"], of_weights)


def _distributions(model: Floats, source: Floats, tokens: NDArray[np.int64]) -> dict[str, float]:
    ours, theirs = _log_softmax(model), _log_softmax(source)
    divergence = np.sum(np.exp(theirs) * (theirs - ours), axis=-1)
    following = tokens[1:, None]

    def perplexity(of: NDArray[np.float64]) -> float:
        return float(np.exp(-np.mean(np.take_along_axis(of[:-1], following, axis=-1))))

    return {
        "kl_mean": float(divergence.mean()),
        "kl_largest": float(divergence.max()),
        "top1_agreement": float(np.mean(ours.argmax(axis=-1) == theirs.argmax(axis=-1))),
        "model_perplexity": perplexity(ours),
        "source_perplexity": perplexity(theirs),
    }


def _log_softmax(logits: Floats) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
