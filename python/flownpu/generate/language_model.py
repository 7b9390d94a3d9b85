# SPDX-License-Identifier: Apache-2.0
"""A model folder opened in ORT GenAI: what `flownpu run`, `chat`, `bench` and `serve` share.

Generator, tokenizer, sampling and chat template are GenAI's own; this module opens the model on the wanted provider,
and measures times.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flownpu.errors import FlowNPUError, check_text, require
from flownpu.generate.image_prompts import ImageProcessor, expand_images
from flownpu.generate.speculative.compatibility import check_draft, check_verifies
from flownpu.generate.speculative.generator import SpeculativeGenerator, Tally
from flownpu.generate.speculative.model import DraftModel, Speculation, SpeculativeModel, VerifyingGraph
from flownpu.model.folder import has_chat_template, most_tokens, read_genai_config
from flownpu.model.integrity import check_sizes
from flownpu.model.onnx_file import DATA_FOLDER
from flownpu.registration import get_ep_name, register

if TYPE_CHECKING:
    from flownpu.generate.images import PreparedImage

__all__ = ["LanguageModel", "Message", "Sampling", "Timing", "Tokens"]

CPU_PLACEMENT: dict[str, Any] = {"summary": "Every node runs on ONNX Runtime's own CPU provider."}

Tokens = NDArray[np.int32]
Message = dict[str, str]
"""One turn of a conversation: its "role" ("user", "assistant", "system") and its "content", with marks for images."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; None leaves a choice to the model's genai_config.json."""

    temperature: float | None = None
    """0 always takes the likeliest token."""
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def search_options(self) -> dict[str, float | int | bool]:
        """The options of GenAI's search."""
        if self.temperature == 0:
            return {"do_sample": False}
        given: dict[str, float | int | bool | None] = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "random_seed": self.seed,
        }
        options = {name: value for name, value in given.items() if value is not None}
        return {"do_sample": True, **options} if options else {}


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
    ) -> None:
        self.folder = folder
        self.provider = provider
        configuration = read_genai_config(folder)
        check_sizes(folder)
        settings = configuration["model"]
        self.context_length = most_tokens(configuration)
        self.vocabulary_size = int(settings["vocab_size"])
        self.can_rewind = _can_rewind(configuration)
        search = configuration.get("search", {})
        self._samples = bool(search.get("do_sample", False))
        self._cache_grows = not search.get("past_present_share_buffer", False)
        self.dynamic_batching: dict[str, Any] | None = configuration.get("engine", {}).get("dynamic_batching")
        """GenAI's settings of a paged model, which only GenAI's engine runs; None: the model is not paged."""
        self.has_chat_template = has_chat_template(folder)
        ending = settings.get("eos_token_id", [])
        self.ending_tokens = frozenset(ending if isinstance(ending, list) else [ending])
        self._genai = require("onnxruntime_genai", extra="genai", purpose="Text generation")
        options = dict(options or {})
        graph = self._verifying_graph(configuration, options, speculation) if speculation else None
        with tempfile.TemporaryDirectory(prefix="flownpu-") as scratch:
            # GenAI gives no access to its sessions, so the provider writes where nodes run to files in this folder: one
            # for each session, of which a model with images has three.
            started = time.perf_counter()
            config = self._configure(options, threads, f"{scratch}/")
            if profile is not None:
                _overlay(config, {"enable_profiling": str(profile)})
            if graph is not None:
                # GenAI takes this to be relative to the model's folder.
                _overlay(config, {DATA_FOLDER: os.path.relpath(graph.data_folder, folder.resolve())})
                config.add_model_data(graph.filename, graph.content)
            self._model = self._genai.Model(config)
            self._tokenizer = self._genai.Tokenizer(self._model)
            self.load_seconds = time.perf_counter() - started
            # "summary" in it is one line on which device computes which nodes, and why.
            self.placement = _placement(Path(scratch), settings["decoder"], in_memory=graph is not None)
            self.vision_placement = _placement(Path(scratch), settings["vision"]) if "vision" in settings else None
        self._image_processor: ImageProcessor | None = None
        if settings["type"] == "gemma3" and "vision" in settings:
            features = settings["vision"].get("outputs", {}).get("image_features", "image_features")
            self._image_processor = ImageProcessor(self._genai, self._model, self._tokenizer, features)
        self.speculative: SpeculativeModel | None = None
        """Makes the generators if the model decodes with candidates; else None."""
        if speculation and graph is not None:
            self.speculative = self._speculative(configuration, speculation, graph, options, threads)

    def _verifying_graph(
        self, configuration: dict[str, Any], options: dict[str, str], speculation: Speculation
    ) -> VerifyingGraph:
        check_verifies(self.folder, configuration, options.get("device", "auto"))
        if speculation.draft is not None:
            check_draft(self.folder, configuration, speculation.draft)
        return VerifyingGraph.of(self.folder, configuration)

    def _speculative(
        self,
        configuration: dict[str, Any],
        speculation: Speculation,
        graph: VerifyingGraph,
        options: dict[str, str],
        threads: int | None,
    ) -> SpeculativeModel:
        device = str(self.placement.get("device", "cpu"))
        if not device.startswith("cpu"):
            raise FlowNPUError(
                f"{self.folder} runs on {device}, which computes one token a step, and candidates take several: take "
                "--device cpu, or leave --lookup and --draft out"
            )
        draft = None
        if speculation.draft is not None:
            opened = LanguageModel(speculation.draft, provider=self.provider, options=options, threads=threads)
            self.load_seconds += opened.load_seconds
            greedy = Sampling(temperature=0)
            draft = DraftModel(
                lambda length: opened.generator(length, greedy), opened.context_length, opened.vocabulary_size
            )
        return SpeculativeModel(self._genai, self.folder, configuration, graph, lookup=speculation.lookup, draft=draft)

    def _configure(self, options: dict[str, str], threads: int | None, reports: str) -> Any:
        config = self._genai.Config(str(self.folder))
        # Removes the folder's providers and leaves their options, so that these still apply.
        config.clear_providers()
        if self.provider == "flownpu":
            register()
            config.append_provider(get_ep_name())
            defaults = {"placement": reports} | ({"threads": str(threads)} if threads else {})
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
        """The tokens of a text that begins a sequence, with the tokenizer's special ones, such as <bos>."""
        self._tokenizer.update_options(add_special_tokens="true")
        return self._encode(text)

    def tokens_of_messages(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> Tokens:
        """The tokens of a conversation in the model's chat template, up to where the model's next reply begins.

        Args:
            messages: the turns; they may have more fields than a `Message`, for templates that read them.
            tools: functions that the model may call, as OpenAI's API describes them; for templates that write tools.
        """
        # The template writes the special tokens itself.
        self._tokenizer.update_options(add_special_tokens="false")
        for message in messages:
            if isinstance(content := message.get("content"), str):
                check_text(content)
        given = {"tools": json.dumps(tools)} if tools else {}
        text = self._tokenizer.apply_chat_template(json.dumps(messages), add_generation_prompt=True, **given)
        return self._encode(text)

    def tokens_of_conversation(self, messages: list[Message]) -> Tokens:
        """Like `tokens_of_messages`; for a model without a chat template, the tokens of the messages' lines."""
        if self.has_chat_template:
            return self.tokens_of_messages(messages)
        return self.tokens_of_text("\n".join(message["content"] for message in messages))

    def _encode(self, text: str) -> Tokens:
        check_text(text)
        if self._image_processor is not None:
            text = expand_images(text)
        return np.asarray(self._tokenizer.encode(text), dtype=np.int32)

    def text_of_token(self, token: int) -> str:
        """The text of a token by itself; part of a character becomes the replacement character, U+FFFD."""
        return str(self._tokenizer.decode(np.array([token], dtype=np.int32)))

    @property
    def takes_images(self) -> bool:
        """Whether prompts may have images, whose places they mark with `image_prompts.IMAGE`."""
        return self._image_processor is not None

    def has_image_tokens(self, tokens: Tokens) -> bool:
        """Whether any of the tokens stands for part of an image."""
        return self._image_processor is not None and self._image_processor.count_tokens(tokens) > 0

    def generator(
        self, max_length: int, sampling: Sampling, *, min_length: int = 0, guidance: tuple[str, str] | None = None
    ) -> Any:
        """A generator of one sequence: GenAI's, or with candidates a `SpeculativeGenerator`, which is used alike.

        Args:
            max_length: most tokens of the sequence, including the prompt.
            sampling: how tokens are chosen.
            min_length: tokens before which the sequence cannot end.
            guidance: GenAI's name of a kind of grammar, such as "json_schema", and the grammar that the new text must
                follow.

        Raises:
            FlowNPUError: GenAI does not understand the guidance, or the model is paged.
        """
        if self.dynamic_batching is not None:
            raise FlowNPUError(
                f"{self.folder} is a paged model, which `flownpu serve` runs: serve it, or convert it without --paged"
            )
        chosen = {"max_length": max_length, "min_length": min_length, **sampling.search_options()}
        if self.speculative is None:
            return self._genai_generator(self._model, chosen, guidance)
        # A cache that grows cannot forget a token that was chosen and is not computed (GenAI 0.18).
        greedy = not chosen.get("do_sample", self._samples) and guidance is None and not self._cache_grows
        read = chosen if greedy else {"max_length": max_length, "do_sample": False}
        return self.speculative.generator(
            max_length,
            lambda: self._genai_generator(self._model, read),
            lambda model: self._genai_generator(model, chosen, guidance),
            reader_chooses=greedy,
        )

    def _genai_generator(
        self, model: Any, search_options: dict[str, Any], guidance: tuple[str, str] | None = None
    ) -> Any:
        parameters = self._genai.GeneratorParams(model)
        parameters.set_search_options(**search_options)
        if guidance is None:
            return self._genai.Generator(model, parameters)
        parameters.set_guidance(*guidance)
        try:
            return self._genai.Generator(model, parameters)
        except RuntimeError as error:
            raise FlowNPUError(f"the {guidance[0]} is not one that GenAI's guidance understands: {error}") from error

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
        decode: Callable[[int], str] = self._tokenizer.create_stream().decode
        return decode

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
    right only where the cache is one buffer of full length, in which the next tokens overwrite the removed ones.
    """
    model = configuration["model"]
    shared = configuration.get("search", {}).get("past_present_share_buffer", False)
    return "vision" not in model or (bool(shared) and "sliding_window" not in model["decoder"])


def _overlay(config: Any, session_options: dict[str, Any]) -> None:
    """Adds options of ONNX Runtime's session to a configuration of GenAI."""
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session_options}}}))
