# SPDX-License-Identifier: Apache-2.0
"""Opens a model folder's graph in ONNX Runtime and runs it on texts in batches; the base of all models of texts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from flownpu.embed.batches import batches, padded
from flownpu.embed.tokens import TextTokenizer
from flownpu.errors import FlowNPUError, require
from flownpu.model.folder import locate_graph
from flownpu.model.integrity import check_sizes
from flownpu.model.kv_cache import PAST, empty_past
from flownpu.model.session import open_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from flownpu.embed.tokens import TokenRow

_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class TextModel:
    """A model folder that is run on texts; subclasses have the methods that embed or score them.

    The graph has the inputs `input_ids`, `attention_mask` and possibly `token_type_ids`. A decoder's KV cache begins
    empty with each batch, and is not kept.

    Args:
        folder: a model folder that `flownpu convert` wrote.
        provider: "flownpu", or "cpu" for ONNX Runtime's own CPU provider.
        options: options of FlowNPU's provider by key, such as {"device": "cpu"}.
        threads: threads of the CPU kernels; None leaves the number to the provider.

    Attributes:
        placement: one line that says which nodes run where.
        load_seconds: how long opening the model took.
        longest: how many tokens a text may have, special tokens included.

    Raises:
        FlowNPUError: the folder holds no model of this kind, or FlowNPU's options are given to another provider.
        MissingDependencyError: onnxruntime or tokenizers is not installed.
        RuntimeError: ONNX Runtime or the provider refuses the model or an option; the message is theirs.
    """

    outputs: ClassVar[tuple[str, ...]]
    """Names of outputs; the first that the graph has is computed."""

    def __init__(
        self,
        folder: Path,
        *,
        provider: str = "flownpu",
        options: Mapping[str, str] | None = None,
        threads: int | None = None,
    ) -> None:
        self.folder = folder
        self.prepare()
        started = time.perf_counter()
        path, settings = locate_graph(folder)
        check_sizes(folder)
        self.tokenizer = TextTokenizer(folder)
        self.longest = self.tokenizer.longest
        self._onnxruntime = require("onnxruntime", extra="embed", purpose="flownpu embed")
        self._value = self._onnxruntime.OrtValue.ortvalue_from_numpy
        self._session, self.placement = open_session(self._onnxruntime, path, provider, options or {}, threads)
        inputs = self._session.get_inputs()
        self._inputs = [value.name for value in inputs if not value.name.startswith(PAST)]
        self._past = [value for value in inputs if value.name.startswith(PAST)]
        self._head_size = int(settings.get("decoder", {}).get("head_size", 0))
        found = [value.name for value in self._session.get_outputs()]
        self._output = next((name for name in self.outputs if name in found), "")
        if not self._output or not set(self._inputs) <= set(_INPUTS):
            raise FlowNPUError(
                f"{path}: expected a graph of {', '.join(_INPUTS)} with an output {' or '.join(self.outputs)}, got "
                f"{', '.join(self._inputs)} and {', '.join(found)}"
            )
        self.load_seconds = time.perf_counter() - started

    def prepare(self) -> None:
        """Reads the folder's other files before the graph is opened; a subclass overrides it."""

    def run(
        self, rows: Sequence[TokenRow], advance: Callable[[int], None] = lambda _: None
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]]:
        """Computes the graph's output for rows of tokens, in batches.

        Args:
            rows: rows of at least one token each.
            advance: called after each batch with the number of its rows.

        Yields:
            For each batch of N rows: their indices in `rows` [N], the output [N, ...], their token counts [N].
        """
        for indices in batches([len(row.ids) for row in rows]):
            batch = [rows[index] for index in indices]
            lengths = np.array([len(row.ids) for row in batch], np.int64)
            ids = padded([row.ids for row in batch], self.tokenizer.padding)
            inputs = {
                "input_ids": ids,
                "attention_mask": (np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64),
                "token_type_ids": padded([row.types for row in batch], 0),
            }
            feeds = {name: self._value(inputs[name]) for name in self._inputs}
            for value in self._past:
                feeds[value.name] = empty_past(self._onnxruntime, value, batch=len(indices), head_size=self._head_size)
            (output,) = self._session.run_with_ort_values([self._output], feeds)
            yield indices, output.numpy(), lengths
            advance(len(indices))


def cut_rows(rows: Sequence[TokenRow]) -> list[int]:
    """Indices of the rows that were cut."""
    return [index for index, row in enumerate(rows) if row.is_cut]
