# SPDX-License-Identifier: Apache-2.0
"""A model folder that is open in ORT GenAI, for `flownpu run`, `chat`, `bench` and `serve`.

Generator and sampling are GenAI's own; this module opens the model on the wanted provider, and measures times.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu.errors import FlowNPUError, check_text, require
from flownpu.generate.chat_template import ChatTemplate
from flownpu.generate.guidance import Guidance, blamed
from flownpu.generate.image_prompts import ImageProcessor, expand_images
from flownpu.generate.penalties import Penalties
from flownpu.generate.speculative.compatibility import check_draft, check_verifies
from flownpu.generate.speculative.drafter import Drafter
from flownpu.generate.speculative.generator import SpeculativeGenerator, Tally
from flownpu.generate.speculative.model import DraftModel, Speculation, SpeculativeModel, VerifyingGraph
from flownpu.generate.speculative.prediction_head import PredictionHead
from flownpu.generate.state_generator import StateGenerator
from flownpu.generate.tokenizer import Tokenizer, Tokens
from flownpu.generate.turns import Content, text_of
from flownpu.model.folder import copies_states, has_states, most_tokens, onnx_path, provider_options, read_genai_config
from flownpu.model.integrity import check_sizes
from flownpu.model.onnx_file import DATA_FOLDER
from flownpu.registration import get_ep_name, register_with_genai
from flownpu.system.opencl_loader import use_packages_of

if TYPE_CHECKING:
    from flownpu.generate.images import PreparedImage

CPU_PLACEMENT: dict[str, Any] = {"summary": "Every node runs on ONNX Runtime's own CPU provider."}

LEAST_TOP_P = 1e-6
"""Leaves the likeliest token alone, unless a million are as likely; GenAI 0.18 ignores a top_p that is 0 in float32.
"""

Message = dict[str, Content]
"""One turn of a conversation: its "role" ("user", "assistant", "system") and its "content"."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; None leaves a choice to the model's genai_config.json."""

    temperature: float | None = None
    """0 always takes the likeliest token."""
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    penalties: Penalties = field(default_factory=Penalties)
    """Changes of the logits, which only the workers of a server make."""

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken.

        A temperature is 0 if it is in float32, as GenAI holds it. Beside a top_k of 1, GenAI's engine refuses others.
        """
        return self.top_k == 1 or (self.temperature is not None and np.float32(self.temperature) == 0)

    def search_options(self) -> dict[str, float | int | bool]:
        """The options of GenAI's search."""
        # `ChangedLogits` penalises repetitions instead of the model.
        own: dict[str, float | int | bool] = {} if self.penalties.repetition is None else {"repetition_penalty": 1.0}
        if self.is_greedy:
            return {"do_sample": False, **own}
        chosen: dict[str, float | int | bool | None] = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": None if self.top_p is None else max(self.top_p, LEAST_TOP_P),
            "random_seed": self.seed,
        }
        options = {name: value for name, value in chosen.items() if value is not None}
        return {"do_sample": True, **options, **own} if options or self.penalties.min_p else own


@dataclass
class Timing:
    """The times of one reply, in seconds."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    images: int = 0
    vision: float | None = 0.0
    """Decoding the images and computing their features; None: not known, and part of the prefill."""
    prefill: float = 0.0
    """From the prompt's first token to the logits of its last."""
    first_token: float = 0.0
    """From the images, or the prompt's first token, to the first new token's text (TTFT)."""
    decode: float = 0.0
    """From the first new token to the last: new_tokens - 1 steps, or fewer with candidates."""
    steps: int = 0
    """Runs of the model after the prompt, if it decodes with candidates; else 0."""
    candidates: int = 0
    """Tokens that were proposed as candidates."""
    kept: int = 0
    """Candidates that became part of the text."""

    @property
    def prefill_rate(self) -> float:
        """Tokens of the prompt per second."""
        return self.prompt_tokens / self.prefill if self.prefill > 0 else 0.0

    @property
    def decode_rate(self) -> float:
        """New tokens per second, without the first, which the prefill computes."""
        return (self.new_tokens - 1) / self.decode if self.decode > 0 else 0.0


class LanguageModel:
    """A GenAI model folder, opened.

    Args:
        folder: holds genai_config.json, the ONNX model and the tokenizer.
        provider: "flownpu", or "cpu" for ONNX Runtime's own CPU provider.
        options: options of FlowNPU's provider by key, such as {"device": "cpu"}.
        threads: threads of the CPU kernels; None leaves the number to the provider.
        profile: prefix of the path to which ONNX Runtime writes its profile when the model is deleted; None: none is
            written.
        speculation: where candidates for the next tokens come from. The text is the same with and without them.
        allow_control_tokens: whether control tokens that are written in the texts of a conversation count as such; else
            they are plain text.

    Raises:
        FlowNPUError: the folder is missing or is not a GenAI model, or FlowNPU's options are given to another provider;
            the model cannot verify candidates, or the draft cannot give them.
        MissingDependencyError: onnxruntime_genai is not installed.
        RuntimeError: GenAI or the provider refuses the model or an option; the message is theirs.
    """

    def __init__(
        self,
        folder: Path,
        *,
        provider: str = "flownpu",
        options: dict[str, str] | None = None,
        threads: int | None = None,
        profile: Path | None = None,
        speculation: Speculation | None = None,
        allow_control_tokens: bool = False,
    ) -> None:
        self.folder = folder
        self.provider = provider
        configuration = read_genai_config(folder)
        check_sizes(folder)
        settings = configuration["model"]
        self.context_length = most_tokens(configuration)
        self.vocabulary_size = int(settings["vocab_size"])
        self._has_states = has_states(configuration)
        self.can_rewind = _can_rewind(configuration)
        search = configuration.get("search", {})
        self._samples = bool(search.get("do_sample", False))
        self._temperature = float(search.get("temperature", 1.0))
        self._cache_grows = not search.get("past_present_share_buffer", False)
        self.dynamic_batching: dict[str, Any] | None = configuration.get("engine", {}).get("dynamic_batching")
        """GenAI's settings of a paged model, which only GenAI's engine runs; None: the model is not paged."""
        self._template = ChatTemplate.of(folder)
        self._template.start()  # it starts while the model loads
        self.has_chat_template = bool(self._template)
        self.chat_template = self._template.texts.get("default", "")
        ending = settings.get("eos_token_id", [])
        self.ending_tokens = frozenset(ending if isinstance(ending, list) else [ending])
        self.tokenizer = Tokenizer(folder, allow_control_tokens=allow_control_tokens)
        self._genai = require("onnxruntime_genai", extra="genai", purpose="Text generation")
        options = dict(options or {})
        graph = self._verifying_graph(configuration, options, speculation) if speculation else None
        with tempfile.TemporaryDirectory(prefix="flownpu-") as scratch:
            # GenAI gives no access to its sessions, so the provider writes placement to files in this folder, one for
            # each session. A model with images has three.
            started = time.perf_counter()
            config = self._configure(options, threads, f"{scratch}/")
            if profile is not None:
                _overlay(config, {"enable_profiling": str(profile)})
            if graph is not None:
                # GenAI takes this to be relative to the model's folder.
                _overlay(config, {DATA_FOLDER: os.path.relpath(graph.data_folder, folder.resolve())})
                config.add_model_data(graph.filename, graph.content)
            self._model = self._genai.Model(config)
            self.load_seconds = time.perf_counter() - started
            # Its field "summary" is a line that says which device computes which nodes, and why.
            self.placement = _placement(Path(scratch), settings["decoder"], in_memory=graph is not None)
            self.vision_placement = _placement(Path(scratch), settings["vision"]) if "vision" in settings else None
        self._image_processor: ImageProcessor | None = None
        if settings["type"] == "gemma3" and "vision" in settings:
            features = settings["vision"].get("outputs", {}).get("image_features", "image_features")
            self._image_processor = ImageProcessor(self._genai, self._model, self.tokenizer, features)
        self.speculative: SpeculativeModel | None = None
        """Makes the generators if the model decodes with candidates; else None."""
        if speculation and graph is not None:
            self.speculative = self._speculative(configuration, speculation, graph, options, threads)

    def _verifying_graph(
        self, configuration: dict[str, Any], options: dict[str, str], speculation: Speculation
    ) -> VerifyingGraph:
        check_verifies(self.folder, configuration, options.get("device", "auto"))
        if speculation.drafter is None and speculation.draft is not None:
            check_draft(self.folder, configuration, speculation.draft)
        has_drafter = speculation.drafter is not None
        if has_drafter and speculation.draft_device is not None:
            raise FlowNPUError(f"{speculation.drafter} drafts where {self.folder} runs: leave --draft-device out")
        return VerifyingGraph.of(
            self.folder, configuration, hidden_states=speculation.head or has_drafter, keys=has_drafter
        )

    def _speculative(
        self,
        configuration: dict[str, Any],
        speculation: Speculation,
        graph: VerifyingGraph,
        options: dict[str, str],
        threads: int | None,
    ) -> SpeculativeModel:
        device = str(self.placement.get("device", "cpu"))
        if not device.startswith("cpu") or " new tokens, and " in device:  # of two devices, one is no CPU
            raise FlowNPUError(
                f"{self.folder} runs on {device}, which computes one token a step, and candidates take several: take "
                "--device cpu, or leave --lookup and --draft out"
            )
        draft = None
        if speculation.drafter is None and speculation.draft is not None:
            where = {} if speculation.draft_device is None else {"device": speculation.draft_device}
            opened = LanguageModel(speculation.draft, provider=self.provider, options=options | where, threads=threads)
            self.load_seconds += opened.load_seconds
            greedy = Sampling(temperature=0)
            draft = DraftModel(
                lambda length: opened.generator(length, greedy), opened.context_length, opened.vocabulary_size
            )
        head: PredictionHead | Drafter | None = None
        if speculation.drafter is not None:
            path = onnx_path(self.folder, configuration)
            head = Drafter(speculation.drafter, graph.model, path, self.provider, options, threads)
        elif speculation.head:
            head = PredictionHead(self.folder, self.provider, options, threads)
        return SpeculativeModel(
            self._genai, self.folder, configuration, graph, lookup=speculation.lookup, draft=draft, head=head
        )

    def _configure(self, options: dict[str, str], threads: int | None, reports: str) -> Any:
        config = self._genai.Config(str(self.folder))
        # Removes the folder's providers and leaves their options, so that these still apply.
        config.clear_providers()
        if self.provider == "flownpu":
            register_with_genai(self._genai)
            config.append_provider(get_ep_name())
            defaults = {"placement": reports} | ({"threads": str(threads)} if threads else {})
            use_packages_of(provider_options(read_genai_config(self.folder)["model"]) | options)
            for key, value in (defaults | options).items():
                config.set_provider_option(get_ep_name(), key, value)
            return config
        if options:
            raise FlowNPUError(
                f"{', '.join(sorted(options))}: an option of FlowNPU's provider, "
                f"given with --provider {self.provider}; leave one of the two out"
            )
        if threads:
            _overlay(config, {"intra_op_num_threads": threads})
        return config

    def tokens_of_text(self, text: str) -> Tokens:
        """The tokens of a text that begins a sequence, with the tokenizer's special ones, such as <bos>.

        The text is the whole prompt: control tokens that are written in it count.
        """
        return self.tokenizer.tokens_of_text(self._expanded(text))

    def tokens_of_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> Tokens:
        """The tokens of a conversation in the model's chat template, up to where the model's next reply begins.

        Args:
            messages: the turns; they may have more fields than a `Message`, for templates that read them.
            tools: functions that the model may call, as OpenAI's API describes them; for templates that write tools.
            variables: what else the template may read, such as {"enable_thinking": False}.

        Raises:
            FlowNPUError: the template does not take the conversation, see `ChatTemplate.render`; or a text is not
                UTF-8.
        """
        for message in messages:
            check_text(text_of(message.get("content")))
        marked = self.tokenizer.mark_messages(messages)
        try:
            text = self._template.render(
                marked, self.tokenizer.mark(tools), **self.tokenizer.mark(dict(variables or {}))
            )
        except FlowNPUError as error:  # a template may quote the text that it refuses
            raise FlowNPUError(self.tokenizer.unmark(str(error))) from error
        return self.tokenizer.tokens_of_marked(self._expanded(text))

    def tokens_of_conversation(self, messages: Sequence[Mapping[str, Any]]) -> Tokens:
        """Like `tokens_of_messages`; for a model without a chat template, the tokens of the messages' lines."""
        if self.has_chat_template:
            return self.tokens_of_messages(messages)
        marked = self.tokenizer.mark_messages(messages)
        text = "\n".join(text_of(message.get("content")) for message in marked)
        return self.tokenizer.tokens_of_marked(self._expanded(text), special_tokens=True)

    def _expanded(self, text: str) -> str:
        return text if self._image_processor is None else expand_images(text)

    @property
    def takes_images(self) -> bool:
        """Whether prompts may have images, whose places they mark with `image_prompts.IMAGE`."""
        return self._image_processor is not None

    def has_image_tokens(self, tokens: Tokens) -> bool:
        """Whether any of the tokens stands for part of an image."""
        return self._image_processor is not None and self._image_processor.count_tokens(tokens) > 0

    def generator(
        self, max_length: int, sampling: Sampling, *, min_length: int = 0, guidance: Guidance | None = None
    ) -> Any:
        """A generator of one sequence: GenAI's, or with candidates a `SpeculativeGenerator` with the same methods.

        Args:
            max_length: most tokens of the sequence, including the prompt.
            sampling: how tokens are chosen.
            min_length: tokens before which the sequence cannot end.
            guidance: the grammar that the new text must follow.

        Raises:
            FlowNPUError: GenAI does not understand the guidance, or the model is paged.
        """
        if self.dynamic_batching is not None:
            raise FlowNPUError(
                f"{self.folder} is a paged model, which `flownpu serve` runs: serve it, or convert it without --paged"
            )
        chosen = {"max_length": max_length, "min_length": min_length, **sampling.search_options()}
        if self.speculative is None:
            return self._with_states(self._genai_generator(self._model, chosen, guidance))
        # A growing cache, or a state, cannot forget a token that was chosen but not computed (GenAI 0.18).
        can_forget = not self._cache_grows and not self._has_states
        greedy = not chosen.get("do_sample", self._samples) and guidance is None and can_forget
        read = chosen if greedy else {"max_length": max_length, "do_sample": False}
        return self.speculative.generator(
            max_length,
            lambda: self._with_states(self._genai_generator(self._model, read)),
            lambda model: self._genai_generator(model, chosen, guidance),
            reader_chooses=greedy,
        )

    def _with_states(self, generator: Any) -> Any:
        return StateGenerator(generator) if self._has_states else generator

    def _genai_generator(self, model: Any, search_options: dict[str, Any], guidance: Guidance | None = None) -> Any:
        parameters = self._genai.GeneratorParams(model)
        parameters.set_search_options(**search_options)
        if guidance is None:
            return self._genai.Generator(model, parameters)
        parameters.set_guidance(*guidance.genai_grammar)
        try:
            return self._genai.Generator(model, parameters)
        except RuntimeError as error:
            raise blamed(error) from error

    def temperature(self, sampling: Sampling) -> float:
        """The number by which GenAI divides the logits; 0 if it takes the likeliest token."""
        options = sampling.search_options()
        return float(options.get("temperature", self._temperature)) if options.get("do_sample", self._samples) else 0.0

    def engine(self) -> Any:
        """A GenAI engine, which computes many requests at a time; it may only be used on the calling thread.

        Raises:
            FlowNPUError: the model is not paged.
        """
        if self.dynamic_batching is None:
            raise FlowNPUError(
                f"{self.folder} is not a paged model, which GenAI's engine wants: convert it with --paged"
            )
        return self._genai.Engine(self._model)

    def text_stream(self) -> Callable[[int], str]:
        """A function that takes a new sequence's tokens one by one, and returns the text that each adds."""
        return self.tokenizer.text_stream()

    def append(self, generator: Any, prompt: Tokens, images: "Sequence[PreparedImage]" = ()) -> float | None:
        """Computes a prompt's tokens; images, one for each mark, must come with the generator's first prompt.

        Returns:
            The seconds of the vision model, see `ImageProcessor.append`; 0 if the model takes no images.

        Raises:
            FlowNPUError: the images do not fit the prompt, or the model takes none.
        """
        if self._image_processor is not None:
            return self._image_processor.append(generator, prompt, images)
        if images:
            raise FlowNPUError(f"the model in {self.folder} takes no images, and {len(images)} were given")
        generator.append_tokens(prompt)
        return 0.0

    def steps(self, generator: Any) -> Iterator[tuple[int, str]]:
        """Generates tokens until the sequence ends; yields each token and the text that it adds."""
        text_of = self.text_stream()
        while not generator.is_done():
            generator.generate_next_token()
            token = int(generator.get_next_tokens()[0])
            yield token, text_of(token)

    def stream(
        self, generator: Any, prompt: Tokens, timing: Timing, images: "Sequence[PreparedImage]" = ()
    ) -> Iterator[str]:
        """Appends the prompt's tokens, then yields the text of each new token; keeps `timing` up to date.

        Images, one for each mark in the prompt, must come with the generator's first prompt.
        """
        tally = generator.tally if isinstance(generator, SpeculativeGenerator) else None
        before = Tally() if tally is None else replace(tally)
        started = time.perf_counter()
        timing.vision = self.append(generator, prompt, images)
        timing.images = len(images)
        timing.prompt_tokens = len(prompt)
        timing.prefill = time.perf_counter() - started - (timing.vision or 0.0)
        for _, text in self.steps(generator):
            elapsed = time.perf_counter() - started
            timing.new_tokens += 1
            timing.first_token = timing.first_token or elapsed
            timing.decode = elapsed - timing.first_token
            if tally is not None:
                timing.steps = tally.steps - before.steps
                timing.candidates = tally.candidates - before.candidates
                timing.kept = tally.kept - before.kept
            yield text

    def complete(
        self,
        prompt: Tokens,
        max_new_tokens: int,
        sampling: Sampling,
        timing: Timing,
        images: "Sequence[PreparedImage]" = (),
    ) -> Iterator[str]:
        """Yields the text that follows the prompt, a token at a time; `images` has one image for each mark in it.

        Raises:
            FlowNPUError: the prompt leaves no room in the model's context.
        """
        if len(prompt) >= self.context_length:
            raise FlowNPUError(
                f"the prompt is {len(prompt)} tokens long and the model's context holds {self.context_length}: "
                "shorten the prompt so that a reply has room"
            )
        length = min(len(prompt) + max_new_tokens, self.context_length)
        yield from self.stream(self.generator(length, sampling), prompt, timing, images)


def _placement(reports: Path, settings: dict[str, Any], *, in_memory: bool = False) -> dict[str, Any]:
    """The provider's placement report on one of a folder's models; `settings` are those of genai_config.json."""
    # "virtual_model" is ONNX Runtime's name of a model that it was given in memory.
    name = "virtual_model" if in_memory else Path(settings.get("filename", "model.onnx")).stem
    report = reports / f"{name}.json"
    placement: dict[str, Any] = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else CPU_PLACEMENT
    return placement


def _can_rewind(configuration: dict[str, Any]) -> bool:
    """Whether GenAI's generator can forget its last tokens.

    For a model with images, GenAI 0.18 removes these tokens from the sequence but leaves the KV cache as it is. That is
    right only where the cache is one buffer of full length, in which the next tokens overwrite the removed ones. Of
    models with states, it copies those that have recurrent ones (`StateGenerator`).
    """
    model = configuration["model"]
    if has_states(configuration) and not copies_states(configuration):
        return False
    shared = configuration.get("search", {}).get("past_present_share_buffer", False)
    return "vision" not in model or (bool(shared) and "sliding_window" not in model["decoder"])


def _overlay(config: Any, session_options: dict[str, Any]) -> None:
    """Adds options of ONNX Runtime's session to a configuration of GenAI."""
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session_options}}}))
