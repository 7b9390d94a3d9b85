# SPDX-License-Identifier: Apache-2.0
"""A model that decodes with candidates: its graph with more logits, its choice, and its sources of candidates."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flownpu.errors import FlowNPUError, require
from flownpu.generate.speculative.budget import CandidateBudget, StepTimes
from flownpu.generate.speculative.candidates import HIDDEN_STATES
from flownpu.generate.speculative.choice import ChoiceModel
from flownpu.generate.speculative.draft import Draft
from flownpu.generate.speculative.drafter import Drafter, DrafterCandidates
from flownpu.generate.speculative.generator import SpeculativeGenerator
from flownpu.generate.speculative.lookup import Lookup
from flownpu.generate.speculative.prediction_head import HeadCandidates, PredictionHead
from flownpu.model.folder import DRAFTER, onnx_path
from flownpu.model.onnx_file import load_model

if TYPE_CHECKING:
    from flownpu.generate.speculative.candidates import Candidates

# Most new tokens of a step. Calls of up to 4 tokens round alike (docs/decisions.md): with more, int8 products and
# attention round differently than in single steps, and other tokens may be chosen.
_ROWS = 4
# GenAI's default slack of a window-sized cache, if genai_config.json has none.
_SLACK = 16
# First estimates of the cost to find a candidate, in plain steps of the model, until it is measured.
_LOOKUP_COST = 0.01
_DRAFT_COST = 0.25


@dataclass(frozen=True)
class Speculation:
    """The sources of candidates; with two, the second is asked when the lookup has found nothing."""

    lookup: bool = False
    draft: Path | None = None
    """Folder of a smaller model with the same tokenizer, or of the model's drafter."""
    draft_device: str | None = None
    """Where it runs; None: where the model does."""
    head: bool = False
    """The model's own head for multi-token prediction."""

    @property
    def drafter(self) -> Path | None:
        """The folder, if what it holds reads the model's keys and values; it runs where the model does."""
        return self.draft if self.draft is not None and (self.draft / DRAFTER).is_file() else None

    def __bool__(self) -> bool:
        return self.lookup or self.head or self.draft is not None


@dataclass(frozen=True)
class VerifyingGraph:
    """A folder's graph, with the logits of up to `rows` new tokens as a further output."""

    filename: str
    content: bytes
    """The ONNX file without the weights, which stay in their files."""
    data_folder: Path
    """The folder of these files, whose names in the graph are relative to it."""
    output: str
    """Name of the further output."""
    rows: int
    """Most new tokens of a call."""
    model: Any
    """The same graph, of onnx_ir."""

    @staticmethod
    def of(
        folder: Path, configuration: dict[str, Any], *, hidden_states: bool = False, keys: bool = False
    ) -> "VerifyingGraph":
        """Reads the graph of a folder and adds the output, in memory.

        Args:
            folder: the model's folder.
            configuration: its genai_config.json.
            hidden_states: whether to add the hidden states, too, as output HIDDEN_STATES.
            keys: whether to add the new tokens' keys and values, too, as `newest_keys` does.

        Raises:
            FlowNPUError: the output cannot be added to this form of graph.
            MissingDependencyError: onnx_ir is not installed.
        """
        path = onnx_path(folder, configuration)
        onnx_ir = require("onnx_ir", extra="convert", purpose="Decoding with candidates")
        rewrites = importlib.import_module("flownpu.graph_rewrites.newest_logits")
        model = load_model(path, purpose="Decoding with candidates")
        unseen = rewrites.add_hidden_states(model, HIDDEN_STATES) if hidden_states else []
        if keys:
            unseen += importlib.import_module("flownpu.graph_rewrites.newest_keys").add_newest_keys(model)
        output, misses = rewrites.add_newest_logits(model, _ROWS)
        misses += unseen
        if misses:
            raise FlowNPUError(
                f"{path} cannot verify candidates ({'; '.join(miss.reason for miss in misses)}): convert the model "
                "again, or leave --lookup and --draft out"
            )
        data_folder = importlib.import_module("flownpu.model.graph_loading").without_links(model, path)
        content = onnx_ir.to_proto(model).SerializeToString()
        return VerifyingGraph(path.name, content, data_folder, output, _ROWS, model)


@dataclass(frozen=True)
class DraftModel:
    """An open draft model."""

    make: Callable[[int], Any]
    """Makes a GenAI generator that takes the likeliest tokens, for a sequence of up to the given number of tokens."""
    context: int
    """Most tokens that it may be made for."""
    vocabulary: int

    def candidates(self, max_length: int, vocabulary: int) -> Draft:
        """Candidates for a sequence of up to `max_length` tokens, of a model with `vocabulary` tokens."""
        context = min(self.context, max_length)
        return Draft(lambda: self.make(context), context, self.vocabulary, vocabulary)


class SpeculativeModel:
    """Makes the generators of a model with candidates.

    Args:
        genai: the module onnxruntime_genai.
        folder: the model's folder.
        configuration: its genai_config.json.
        graph: the graph with which the model was opened.
        lookup: whether to look for the text's last tokens earlier in the text.
        draft: the draft model, if there is one.
        head: the model's own head, or its drafter, if it gives candidates.
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
        head: PredictionHead | Drafter | None = None,
    ) -> None:
        self._graph = graph
        self._draft, self._head = draft, head
        self._vocabulary = int(configuration["model"]["vocab_size"])
        self._choice = ChoiceModel(genai, folder, self._vocabulary)
        window = configuration["model"]["decoder"].get("sliding_window")
        self.reach: int | None = None if window is None else window["window_size"] + window.get("cache_slack", _SLACK)
        """Length of a sequence up to which it gets candidates; None: any. A window-sized cache that has dropped tokens
        cannot be rewound."""
        self.times = StepTimes()
        self.budgets: dict[str, CandidateBudget] = {}
        """The budget of each source, "lookup", "draft" and "head" (also of a drafter); all sequences share it."""
        if lookup:
            self.budgets["lookup"] = CandidateBudget(self.times, graph.rows - 1, _LOOKUP_COST)
        if draft is not None:
            self.budgets["draft"] = CandidateBudget(self.times, graph.rows - 1, _DRAFT_COST)
        if head is not None:
            self.budgets["head"] = CandidateBudget(self.times, graph.rows - 1, _DRAFT_COST)

    def generator(
        self,
        max_length: int,
        make_reader: Callable[[], Any],
        make_choice: Callable[[Any], Any],
        *,
        reader_chooses: bool,
    ) -> Any:
        """A `SpeculativeGenerator` of one sequence.

        Args:
            max_length: most tokens of the sequence, including the prompt.
            make_reader: makes GenAI's generator of the model.
            make_choice: makes GenAI's generator of the model it is given, `ChoiceModel`'s, with the wanted sampling and
                guidance.
            reader_chooses: whether the reader, with the choice's settings, always chooses what the choice would.
        """
        sources: list[tuple[Candidates, CandidateBudget]] = []
        if "lookup" in self.budgets:
            sources.append((Lookup(), self.budgets["lookup"]))
        if self._draft is not None:
            sources.append((self._draft.candidates(max_length, self._vocabulary), self.budgets["draft"]))
        follower: HeadCandidates | DrafterCandidates | None = None
        if isinstance(self._head, Drafter):
            follower = DrafterCandidates(self._head, max_length, self._vocabulary)
        elif self._head is not None:
            follower = HeadCandidates(self._head, max_length)
        if follower is not None:
            sources.append((follower, self.budgets["head"]))
        return SpeculativeGenerator(
            make_reader(),
            self._choice.choice(make_choice),
            sources,
            self.times,
            output=self._graph.output,
            most_rows=self._graph.rows,
            reader_chooses=reader_chooses,
            reach=max_length if self.reach is None else min(self.reach, max_length),
            follower=follower,
        )
