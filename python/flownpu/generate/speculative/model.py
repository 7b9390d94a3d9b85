# SPDX-License-Identifier: Apache-2.0
"""What a model needs beside itself to decode with candidates."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flownpu.errors import FlowNPUError, require
from flownpu.generate.speculative.choice import ChoiceModel
from flownpu.generate.speculative.draft import Draft
from flownpu.generate.speculative.generator import SpeculativeGenerator
from flownpu.generate.speculative.lookup import Lookup
from flownpu.generate.speculative.pace import Pace, StepTimes
from flownpu.model.folder import onnx_path
from flownpu.model.onnx_file import load_model

if TYPE_CHECKING:
    from flownpu.generate.speculative.candidates import Candidates

__all__ = ["DraftModel", "Speculation", "SpeculativeModel", "VerifyingGraph"]

# New tokens of a step at most. Calls of up to 4 have one arithmetic (docs/decisions.md): with more, products of int8
# and attention round otherwise than in single steps, and tokens may be others.
_ROWS = 4
# GenAI's own slack of a window-sized cache, if genai_config.json has none.
_SLACK = 16
# What it costs to find a candidate, in steps of the model, before it is measured.
_LOOKUP_COST = 0.01
_DRAFT_COST = 0.25


@dataclass(frozen=True)
class Speculation:
    """Where candidates come from; where both are wanted, the draft is asked when the lookup has found nothing."""

    lookup: bool = False
    draft: Path | None = None
    """Folder of a smaller model of the same tokenizer."""

    def __bool__(self) -> bool:
        return self.lookup or self.draft is not None


@dataclass(frozen=True)
class VerifyingGraph:
    """A folder's graph, with the logits of few new tokens as an output."""

    filename: str
    content: bytes
    """The ONNX file; its weights stay where they are."""
    output: str
    """Name of the output."""
    rows: int
    """New tokens of a call at most."""

    @staticmethod
    def of(folder: Path, configuration: dict[str, Any]) -> "VerifyingGraph":
        """Changes the graph of a folder, in memory.

        Args:
            folder: the model's.
            configuration: its genai_config.json.

        Raises:
            FlowNPUError: the graph has a form in which it cannot be done.
            MissingDependencyError: onnx_ir is not installed.
        """
        path = onnx_path(folder, configuration)
        onnx_ir = require("onnx_ir", extra="convert", purpose="Decoding with candidates")
        add_newest_logits = importlib.import_module("flownpu.graph_rewrites.newest_logits").add_newest_logits
        model = load_model(path, purpose="Decoding with candidates")
        output, misses = add_newest_logits(model, _ROWS)
        if not output:
            raise FlowNPUError(
                f"{path} cannot verify candidates ({'; '.join(miss.reason for miss in misses)}): convert the model "
                "again, or leave --lookup and --draft out"
            )
        return VerifyingGraph(path.name, onnx_ir.to_proto(model).SerializeToString(), output, _ROWS)


@dataclass(frozen=True)
class DraftModel:
    """A model that was opened to draft."""

    make: Callable[[int], Any]
    """Makes a GenAI generator of up to so many tokens, which takes the likeliest ones."""
    context: int
    """Tokens that it may be made for at most."""
    vocabulary: int

    def candidates(self, max_length: int, vocabulary: int) -> Draft:
        """For a sequence of up to `max_length` tokens of a model of `vocabulary` tokens."""
        context = min(self.context, max_length)
        return Draft(lambda: self.make(context), context, self.vocabulary, vocabulary)


class SpeculativeModel:
    """Makes the generators of a model with candidates.

    Args:
        genai: the module onnxruntime_genai.
        folder: the model's.
        configuration: its genai_config.json.
        graph: with which the model was opened.
        lookup: whether to look for the text's last tokens in the text.
        draft: None: there is none.
    """

    def __init__(
        self,
        genai: Any,
        folder: Path,
        configuration: dict[str, Any],
        graph: VerifyingGraph,
        *,
        lookup: bool,
        draft: "DraftModel | None",
    ) -> None:
        self._graph = graph
        self._draft = draft
        self._vocabulary = int(configuration["model"]["vocab_size"])
        self._choice = ChoiceModel(genai, folder, self._vocabulary)
        window = configuration["model"]["decoder"].get("sliding_window")
        self.reach: int | None = None if window is None else window["window_size"] + window.get("cache_slack", _SLACK)
        """Tokens of a sequence until which it has candidates; None: all. A window-sized cache that has dropped tokens
        cannot be taken back."""
        self.times = StepTimes()
        self.paces: dict[str, Pace] = {}
        """What is known of the sources of candidates, by "lookup" and "draft"; it holds for all sequences."""
        if lookup:
            self.paces["lookup"] = Pace(self.times, graph.rows - 1, _LOOKUP_COST)
        if draft is not None:
            self.paces["draft"] = Pace(self.times, graph.rows - 1, _DRAFT_COST)

    def generator(
        self,
        max_length: int,
        make_reader: Callable[[], Any],
        make_choice: Callable[[Any], Any],
        *,
        reader_chooses: bool,
    ) -> Any:
        """Like a GenAI generator of one sequence of up to `max_length` tokens.

        Args:
            max_length: the prompt's tokens included.
            make_reader: makes GenAI's generator of the model.
            make_choice: makes one of another model, with the sampling and guidance that are wanted.
            reader_chooses: whether the first one has the same settings, and draws nothing.
        """
        sources: list[tuple[Candidates, Pace]] = []
        if "lookup" in self.paces:
            sources.append((Lookup(), self.paces["lookup"]))
        if self._draft is not None:
            sources.append((self._draft.candidates(max_length, self._vocabulary), self.paces["draft"]))
        return SpeculativeGenerator(
            make_reader(),
            self._choice.choice(make_choice),
            sources,
            self.times,
            output=self._graph.output,
            most_rows=self._graph.rows,
            reader_chooses=reader_chooses,
            reach=max_length if self.reach is None else min(self.reach, max_length),
        )
