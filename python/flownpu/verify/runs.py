# SPDX-License-Identifier: Apache-2.0
"""Runs a decoder on given tokens and returns the hidden states between its layers: an ONNX graph, or a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu.errors import FlowNPUError, require
from flownpu.model.kv_cache import PAST, empty_past
from flownpu.model.onnx_file import DATA_FOLDER
from flownpu.ops import q4nx
from flownpu.registration import get_ep_name, register
from flownpu.verify.graph import DecoderGraph, hidden_input

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Tokens = NDArray[np.int64]

_TYPES = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}
# The number of rows of the LM head that are quantised at once: 64 MB with 2048 columns.
_ROWS = 8192


@dataclass(frozen=True)
class Run:
    """The results of a decoder for S tokens.

    Attributes:
        hidden: the residual stream before layer 0, before layer 1, .., after the last layer, each float32 [S, D].
        logits: float32 [S, V].
    """

    hidden: list[Floats]
    logits: Floats


def relative_error(value: Floats, reference: Floats) -> float:
    """Root of the mean over tokens of (|value - reference| / |reference|)^2: all tokens weigh alike.

    Both are [S, D].
    """
    difference = np.linalg.norm(value.astype(np.float64) - reference, axis=-1)
    size = np.linalg.norm(reference.astype(np.float64), axis=-1)
    return float(np.sqrt(np.mean((difference / np.maximum(size, np.finfo(np.float64).tiny)) ** 2)))


# --- ONNX -------------------------------------------------------------------------------------------------------------


class GraphRun:
    """A decoder's graph in a session of ONNX Runtime.

    Args:
        path: the .onnx file.
        head_size: the head size for KV caches whose last dimension is symbolic, or 0.
        options: options of FlowNPU's provider; None: ONNX Runtime's CPU provider runs the graph, without optimising it.
        forced: whether each layer starts from hidden states that `run` is given.

    Raises:
        FlowNPUError: the graph is not a decoder whose layers can be told apart.
        RuntimeError: ONNX Runtime or the provider refuses the model or an option.
    """

    def __init__(self, path: Path, head_size: int, options: Mapping[str, str] | None, *, forced: bool = False) -> None:
        self._onnxruntime = require("onnxruntime", extra="genai", purpose="flownpu verify")
        graph = DecoderGraph(path)
        self.quantised, self._hidden, self._head_size = graph.quantised, graph.hidden, head_size
        if forced:
            graph.force()
        session_options = self._onnxruntime.SessionOptions()
        session_options.log_severity_level = 3
        proto, folder = graph.proto()
        # A model that is given as bytes does not name the folder of its weights.
        session_options.add_session_config_entry(DATA_FOLDER, str(folder))
        providers: list[Any] = ["CPUExecutionProvider"]
        if options is None:
            level = self._onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            session_options.graph_optimization_level = level
        else:
            register()
            providers = [(get_ep_name(), dict(options))]
        self._session = self._onnxruntime.InferenceSession(proto, session_options, providers=providers)

    def run(self, tokens: Tokens, hidden: Sequence[Floats] = ()) -> Run:
        """Runs the decoder on a prompt.

        Args:
            tokens: int64 [S].
            hidden: if the run is forced, the state that each layer and the head start from, as in `Run.hidden`.

        Raises:
            FlowNPUError: a token is not in the model's vocabulary.
        """
        _check_tokens(tokens, next(value for value in self._session.get_outputs() if value.name == "logits").shape[-1])
        given = {hidden_input(layer): state[None] for layer, state in enumerate(hidden)}
        feeds = {value.name: self._feed(value, tokens, given) for value in self._session.get_inputs()}
        outputs = self._session.run_with_ort_values([*self._hidden, "logits"], feeds)
        *states, logits = [output.numpy()[0].astype(np.float32) for output in outputs]
        return Run(states, logits)

    def _feed(self, value: Any, tokens: Tokens, given: dict[str, Floats]) -> Any:
        make = self._onnxruntime.OrtValue.ortvalue_from_numpy
        if value.name in given:
            return make(np.ascontiguousarray(given[value.name]))
        count = len(tokens)
        known = {"input_ids": tokens, "attention_mask": np.ones(count), "position_ids": np.arange(count)}
        if value.name in known:
            return make(np.ascontiguousarray(known[value.name][None], dtype=_TYPES[value.type]))
        if not value.name.startswith(PAST):
            raise FlowNPUError(f"expected a decoder of text, got one with the input {value.name}: it cannot be fed")
        return empty_past(self._onnxruntime, value, head_size=self._head_size)


# --- PyTorch ----------------------------------------------------------------------------------------------------------


class Checkpoint:
    """A Hugging Face checkpoint that transformers runs in float32.

    Hooks record each layer's input, since the last of the states that `output_hidden_states` yields is normalised.

    Raises:
        FlowNPUError: the checkpoint's residual stream has a multiplier.
        MissingDependencyError: torch or transformers is not installed.
    """

    def __init__(self, folder: Path) -> None:
        self._torch = require("torch", extra="verify", purpose="flownpu verify against a checkpoint")
        transformers = require("transformers", extra="verify", purpose="flownpu verify against a checkpoint")
        transformers.utils.logging.disable_progress_bar()  # stderr is for the command's own progress
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=self._torch.float32, attn_implementation="eager"
        ).eval()
        if getattr(self._model.config, "residual_multiplier", 1.0) != 1.0:
            raise FlowNPUError(
                f"{folder}: what attention and feed-forward add is multiplied (residual_multiplier), and a converted "
                "model keeps its residual stream divided by that: its layers cannot be compared"
            )
        self._decoder = self._model.get_decoder()
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def run(self, tokens: Tokens) -> Run:
        """Runs the decoder on a prompt int64 [S].

        Raises:
            FlowNPUError: a token is not in the checkpoint's vocabulary.
        """
        _check_tokens(tokens, self._model.get_input_embeddings().num_embeddings)
        torch, decoder = self._torch, self._decoder
        self._calls = []

        def note(_module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            self._calls.append((arguments, keywords))

        hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in (*decoder.layers, decoder.norm)]
        try:
            with torch.no_grad():
                logits = self._model(input_ids=torch.from_numpy(tokens[None]), use_cache=False).logits
        finally:
            for hook in hooks:
                hook.remove()
        hidden = [_first(arguments, keywords)[0].numpy() for arguments, keywords in self._calls]
        return Run(hidden, logits[0].numpy())

    def rounded_outputs(self, tokens: Tokens, run: Run) -> Run:
        """The outputs of the embedding, of each layer and of the head, with their weights rounded to Q4NX.

        Each starts from its own input in `run`, which must be the last run. So errors do not reach the next stage.
        """
        torch = self._torch
        rows = self._model.get_input_embeddings().weight.detach().numpy()[tokens]
        scale = np.vdot(rows, run.hidden[0]) / np.vdot(rows, rows)  # some families scale embeddings
        states = [(scale * _rounded(rows)).astype(np.float32)]
        with torch.no_grad():
            for layer, (arguments, keywords) in zip(self._decoder.layers, self._calls[:-1], strict=True):
                weights = [module.weight for module in layer.modules() if isinstance(module, torch.nn.Linear)]
                weights += [parameter for parameter in layer.parameters() if parameter.ndim == 3]  # those of experts
                kept = [weight.data for weight in weights]
                for weight in weights:
                    weight.data = torch.from_numpy(_rounded(weight.detach().numpy()))
                output = layer(*arguments, **keywords)
                for weight, data in zip(weights, kept, strict=True):
                    weight.data = data
                states.append((output[0] if isinstance(output, tuple) else output)[0].numpy())
            normalised = self._decoder.norm(torch.from_numpy(run.hidden[-1])).numpy()
        return Run(states, self._logits(normalised))

    def _logits(self, normalised: Floats) -> Floats:
        """Logits of hidden states [S, D] with the LM head in Q4NX."""
        weight = self._model.get_output_embeddings().weight.detach().numpy()
        parts = [normalised @ _rounded(weight[first : first + _ROWS]).T for first in range(0, len(weight), _ROWS)]
        logits: Floats = np.concatenate(parts, axis=-1)
        cap = getattr(self._model.config.get_text_config(), "final_logit_softcapping", None)
        return logits if cap is None else (cap * np.tanh(logits / cap)).astype(np.float32)


def _check_tokens(tokens: Tokens, vocabulary: int | str | None) -> None:
    """Raises FlowNPUError unless all tokens are in a vocabulary of that size, which a graph may not state."""
    if isinstance(vocabulary, int) and tokens.max() >= vocabulary:
        raise FlowNPUError(
            f"the tokenizer.json beside the model gives token {tokens.max()}, and there are {vocabulary}: it is of "
            "another model"
        )


def _first(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    return arguments[0] if arguments else keywords["hidden_states"]


def _rounded(weight: Floats) -> Floats:
    """A weight [M, K], or several [.., M, K], quantised to Q4NX and dequantised."""
    rows = np.ascontiguousarray(weight, dtype=np.float32).reshape(-1, weight.shape[-1])
    rounded: Floats = q4nx.dequantize_codes(q4nx.quantize(rows)).reshape(weight.shape)
    return rounded
