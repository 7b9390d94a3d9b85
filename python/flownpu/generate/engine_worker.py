# SPDX-License-Identifier: Apache-2.0
"""The worker for paged models: GenAI's engine computes the next tokens of all requests in one run of the model."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flownpu.errors import ContextLengthError, FlowNPUError, require
from flownpu.generate.guidance import blamed, rehearse
from flownpu.generate.language_model import LanguageModel
from flownpu.generate.speculative.choice import ChoiceModel
from flownpu.generate.stop_texts import StopTexts
from flownpu.generate.worker import Deliver, Failed, Finished, FinishReason, Piece, Request, Started, Worker

# Capacity of the buffer for a run's events: enough for one event from each of the most sequences that folders allow.
_EVENTS = 256
# GenAI's names for what LanguageModel calls search options.
_SETTERS = {
    "do_sample": "set_do_sample",
    "temperature": "set_temperature",
    "top_k": "set_top_k",
    "top_p": "set_top_p",
    "random_seed": "set_seed",
    "repetition_penalty": "set_repetition_penalty",
}


# Room for new tokens that a request which can be interrupted must find before it begins. It makes interruptions rare,
# and a request whose limit is far above what it generates does not keep others waiting.
_ROOM = 128

# Runs in a row that GenAI's engine may repeat before the requests' grammars are checked: an error in a grammar makes it
# repeat them for ever.
_REPEATS = 3
# Seconds for which GenAI's engine may repeat runs if no grammar is at fault. A temporary cause, such as a lack of
# memory, has ended by then. Without this wait, a server on a starved machine refused seven valid requests in an hour.
_PATIENCE = 10.0
_PAUSE = 0.01
"""Seconds between two such runs."""
# Tokens that are tried after a request's last one to find out whether its grammar is at fault, because the engine does
# not name the token that it had chosen. A failing grammar has just begun an object or a list, which few tokens do.
_TRIALS = 16


@dataclass(eq=False)
class _Turn:
    """A request that has begun."""

    request: Request
    deliver: Deliver
    limit: int
    """Most new tokens."""
    stops: StopTexts
    text_of: Callable[[int], str]
    genai_request: Any = None
    """GenAI's request; None: it was interrupted, and waits to go on."""
    number: int = 0
    """GenAI's number of the turn in its request."""
    tokens: list[int] = field(default_factory=list)
    """New tokens so far."""
    ending: FinishReason | None = None
    """Why this worker ended the request; the engine has yet to report that the turn is finished."""
    cached_tokens: int = 0
    new_tokens: int = 0

    def finished(self, reason: FinishReason) -> Finished:
        tokens = len(self.request.tokens)
        return Finished(reason, tokens, self.cached_tokens, self.new_tokens, self.stops.found)

    @property
    def can_be_interrupted(self) -> bool:
        """Whether it can continue from its tokens alone: a grammar and a seeded choice have separate state."""
        sampling = self.request.sampling
        return self.request.guidance is None and (sampling.seed is None or sampling.is_greedy)

    @property
    def reach(self) -> int:
        """Tokens, of the prompt and new ones, for which there must be room before the request begins or goes on."""
        new = min(len(self.tokens) + _ROOM, self.limit) if self.can_be_interrupted else self.limit
        return len(self.request.tokens) + new


class EngineWorker(Worker):
    """Answers as many requests at a time as the folder's settings allow, all of them in each run of the model.

    Requests join and leave between two runs. Whole blocks at the beginning of a prompt that an earlier prompt had, too,
    are taken from the KV cache while it holds them; of requests that come together and begin alike, the first computes
    these blocks and the others wait for it.

    A request begins when there are blocks for its prompt and some new tokens. When requests have grown into all
    blocks, GenAI 0.18 would let them wait for one another for ever: the one that began last is then interrupted, and
    goes on from its tokens when others have ended. A request that cannot be interrupted (with guidance, or sampled with
    a seed) begins when there are blocks for the most tokens that it may have.

    Args:
        model: the model, which must be paged.
        context: most tokens of a prompt and its answer together.

    Raises:
        FlowNPUError: the model is not paged.
        RuntimeError: GenAI refuses the model; the message is GenAI's.
    """

    gives_likelihoods = False
    """GenAI 0.18 samples inside its engine: events have tokens, and there is no access to the logits."""

    def __init__(self, model: LanguageModel, *, context: int) -> None:
        super().__init__(model)
        self._genai = require("onnxruntime_genai", extra="genai", purpose="Text generation")
        self._turns: list[_Turn] = []
        self._interrupted: list[_Turn] = []
        self._repeats = 0
        """Runs in a row that ended without tokens, to be repeated."""
        self._repeating_since = 0.0
        self._engine: Any = None
        self._refused: Exception | None = None
        ready = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(ready,), name=f"flownpu {model.folder.name}", daemon=True
        )
        self._thread.start()
        ready.wait()
        if self._refused is not None:
            raise self._refused
        settings = model.dynamic_batching or {}
        self._block_size = int(settings.get("block_size", 256))
        # Without num_blocks GenAI takes the memory that there is, and tells how long a request may be.
        self._blocks = int(settings.get("num_blocks") or self._longest // self._block_size)
        self.slots = self._most_requests
        self.context_length = min(context, model.context_length, self._longest, self._blocks * self._block_size)

    def _run(self, ready: threading.Event) -> None:
        """Answers requests until the worker is closed; runs on the engine's thread."""
        try:
            self._open()
        except Exception as error:  # noqa: BLE001 it is raised in __init__
            self._refused = error
            ready.set()
            return
        ready.set()
        while self._take_requests(idle=not self._turns and not self._interrupted):
            self._begin_waiting()
            self._step()
        for turn in [*self._turns, *self._interrupted]:
            self._end(turn, turn.finished("cancelled"))
        self._end_waiting()
        self._engine = self._events = None

    def _open(self) -> None:
        self._engine = self.model.engine()
        self._events = self._engine.create_event_buffer(_EVENTS)
        capabilities = self._engine.get_capabilities()
        self._most_requests = int(capabilities.configured_max_batch_size)
        self._longest = int(capabilities.max_request_length)

    def _cancel(self, request: Request) -> None:
        for turn in list(self._turns):
            if turn.request is request:
                self._stop(turn, "cancelled")
        for turn in list(self._interrupted):
            if turn.request is request:
                self._end(turn, turn.finished("cancelled"))

    def _begin_waiting(self) -> None:
        """Gives the engine interrupted requests, then waiting ones in the order they came, while there is room."""
        while self._interrupted and self._has_room(self._interrupted[-1]):
            turn = self._interrupted.pop()
            self._attempt(turn.deliver, lambda turn=turn: self._begin(turn))  # type: ignore[misc]
        if self._interrupted or len(self._turns) >= self.slots:
            return
        for waiting in list(self._waiting):
            request, deliver = waiting
            if self._is_being_computed(request):
                continue
            limit = min(request.max_new_tokens, self.context_length - len(request.tokens))
            turn = _Turn(request, deliver, limit, StopTexts(request.stop), self.model.text_stream())
            if not self._has_room(turn):
                return
            self._waiting.remove(waiting)
            self._attempt(deliver, lambda turn=turn: self._begin_first(turn))  # type: ignore[misc]

    def _is_being_computed(self, request: Request) -> bool:
        """Whether this prompt shares more blocks with an unfinished prompt than with any computed one.

        GenAI looks up a prompt's part of the KV cache when the request begins, so the request would now compute these
        blocks again. Waiting costs little, because earlier prompts are computed first anyway.
        """

        def most_blocks(turns: Iterable[_Turn]) -> int:
            return max((self._shared_blocks(turn.request, request) for turn in turns), default=0)

        begun = most_blocks(turn for turn in self._turns if not turn.tokens)
        return begun > 0 and begun > most_blocks(turn for turn in self._turns if turn.tokens)

    def _shared_blocks(self, one: Request, other: Request) -> int:
        """Whole blocks of the KV cache that two prompts have in common; the last token is always computed."""
        length = min(len(one.tokens), len(other.tokens) - 1)
        differs = np.flatnonzero(one.tokens[:length] != other.tokens[:length])
        return int(differs[0] if len(differs) else length) // self._block_size

    @staticmethod
    def _attempt(deliver: Deliver, begin: Callable[[], None]) -> None:
        try:
            begin()
        except Exception as error:  # noqa: BLE001 whatever it is, it ends this request and no other
            deliver(Failed(error))

    def _has_room(self, turn: _Turn) -> bool:
        needed = sum(-(-each.reach // self._block_size) for each in (turn, *self._turns))
        return not self._turns or (needed <= self._blocks and len(self._turns) < self.slots)

    def _begin_first(self, turn: _Turn) -> None:
        request = turn.request
        if request.images:
            raise FlowNPUError("a paged model takes no images: send the request without them")
        if request.sampling.penalties and not request.sampling.penalties.only_repetition:
            raise FlowNPUError(
                "a paged model takes repetition_penalty, and no frequency_penalty, presence_penalty, repeat_last_n, "
                "logit_bias and min_p: ORT GenAI's engine, which computes it, gives tokens and no logits. Leave them "
                "out, or serve the model converted without --paged"
            )
        if turn.limit < 1:
            raise ContextLengthError(
                f"the prompt is {len(request.tokens)} tokens long and the model's context holds {self.context_length}: "
                "shorten the prompt so that a reply has room"
            )
        unknown = [token for token in request.tokens if not 0 <= token < self.model.vocabulary_size]
        if unknown:
            # The model would refuse such a token, and with it the run of all requests.
            raise FlowNPUError(f"expected tokens from 0 to {self.model.vocabulary_size - 1}, got {unknown[0]}")
        self._begin(turn)
        turn.deliver(Started(len(request.tokens)))

    def _begin(self, turn: _Turn) -> None:
        """Gives a request to the engine: its prompt, and the new tokens that it has so far if it was interrupted."""
        if self._engine is None:
            self._open()
        request = turn.request
        genai_request = self._engine.create_request()
        options = self._genai.TurnOptions(genai_request)
        options.set_max_generated_tokens(turn.limit - len(turn.tokens))
        repetition = request.sampling.penalties.repetition
        penalised = {} if repetition is None else {"repetition_penalty": repetition}
        for name, value in (request.sampling.search_options() | penalised).items():
            getattr(options, _SETTERS[name])(value)
        if request.guidance is not None:
            options.set_guidance(*request.guidance.genai_grammar)
        tokens = np.concatenate([request.tokens, turn.tokens]).astype(np.int32)
        try:
            turn.number = genai_request.begin_turn(tokens, options)
        except RuntimeError as error:
            genai_request.close()
            raise blamed(error) from error
        turn.genai_request = genai_request
        self._turns.append(turn)

    def _interrupt(self) -> None:
        """Frees the blocks of the request that began last among those that can be interrupted."""
        turn = next((turn for turn in reversed(self._turns) if turn.can_be_interrupted and turn.ending is None), None)
        if turn is None or len(self._turns) == 1:
            self._fail_all(RuntimeError("GenAI's engine has no block left, and no request that could give one"))
            return
        self._turns.remove(turn)
        self._interrupted.append(turn)
        turn.genai_request.close()
        turn.genai_request = None

    def _step(self) -> None:
        """One run of the model for all requests."""
        if not self._turns:
            return
        try:
            events = self._engine.run(self._events)
        except Exception as error:  # noqa: BLE001 it fails all requests
            self._fail_all(error)
            return
        codes = self._genai.EngineErrorCode
        if any(event.error_code in (codes.ENGINE_EXECUTION_FAILURE, codes.ENGINE_CONTRACT_FAILURE) for event in events):
            self._fail_all(self._cause())
            return
        repeats = any(event.error_code == codes.RETRYABLE_EXECUTION for event in events)
        self._repeats = self._repeats + 1 if repeats else 0
        if self._repeats > _REPEATS:
            self._blame()
        for event in events:
            turn = next((turn for turn in self._turns if turn.genai_request is event.request), None)
            if turn is not None:  # None: a request that has just ended, which may have got one more token
                self._take(turn, event)
        # If all events report that there are no free blocks, no request can continue.
        if all(event.flags & self._genai.EngineEventFlags.CAPACITY_BLOCKED for event in events) and events:
            self._interrupt()

    def _blame(self) -> None:
        """Ends the requests for which the engine repeats its run: it does not say which, and computes none meanwhile.

        Only an error of a grammar is known to repeat without end. If no grammar is found out and it goes on, it is the
        request with a grammar that began last; if it was not this one, the next follows.
        """
        now, is_first = time.monotonic(), self._repeats == _REPEATS + 1
        if is_first:
            self._repeating_since = now
        guided = [turn for turn in self._turns if turn.request.guidance is not None]
        guilty = self._errors_of_grammars(guided) if guided and is_first else []
        if not guilty and now - self._repeating_since <= _PATIENCE:
            time.sleep(_PAUSE)
            return
        self._repeats = 0
        if not guided:
            self._fail_all(RuntimeError("GenAI's engine repeats its run without end, and does not say why"))
            return
        unknown = FlowNPUError("GenAI's guidance cannot go on with the schema or the tools: simplify them")
        for turn, error in guilty or [(guided[-1], unknown)]:
            self._end(turn, turn.finished(turn.ending) if turn.ending else Failed(error))

    def _errors_of_grammars(self, turns: list[_Turn]) -> list[tuple[_Turn, Exception]]:
        """The requests with whose grammars guidance cannot go on behind their tokens, and why."""
        errors: list[tuple[_Turn, Exception]] = []
        choices = ChoiceModel(self._genai, self.model.folder, self.model.vocabulary_size)
        for turn in turns:
            assert turn.request.guidance is not None
            tried: list[int] = []
            try:
                while len(tried) < _TRIALS:
                    # Two tokens, because one is committed when the next is chosen.
                    written = rehearse(self._genai, choices, turn.request.guidance, 2, tokens=turn.tokens, last=tried)[
                        len(turn.tokens) :
                    ]
                    if not written or written[0] in tried:
                        break  # the grammar allows no others
                    tried.append(written[0])
            except RuntimeError as error:
                errors.append((turn, error))
        return errors

    def _cause(self) -> Exception:
        """The reason of the engine's failure, which it reports only when the next request is created."""
        try:
            self._engine.create_request()
        except RuntimeError as error:
            return error
        return RuntimeError("GenAI's engine failed, and did not say why")

    def _fail_all(self, error: Exception) -> None:
        """Fails all requests and drops the engine, unusable after a failed run; the next request gets a new one."""
        delivers = [turn.deliver for turn in self._turns]
        self._turns.clear()
        self._engine = self._events = None
        for deliver in delivers:
            deliver(Failed(error))

    def _take(self, turn: _Turn, event: Any) -> None:
        flags, reasons = self._genai.EngineEventFlags, self._genai.FinishReason
        if event.flags & flags.FAILED:
            self._end(turn, Failed(RuntimeError(f"GenAI's engine ended the request: {event.error_code.name}")))
            return
        ended = bool(event.flags & flags.TURN_FINISHED)
        if event.flags & flags.TOKEN and turn.ending is None:
            turn.tokens.append(int(event.token))
            self._add(turn, turn.text_of(turn.tokens[-1]), is_last=ended)
        if not ended:
            return
        turn.cached_tokens = min(int(event.usage.cached_prompt_tokens), len(turn.request.tokens) - 1)
        if turn.ending is None and event.finish_reason == reasons.EOS:
            # There is no event for the token that ended the answer.
            self._add(turn, "", is_last=True)
            turn.ending = "stop"
        self._end(turn, turn.finished(turn.ending or "length"))

    def _add(self, turn: _Turn, text: str, *, is_last: bool) -> None:
        """Delivers a new token's text; ends the answer at a stop text."""
        turn.new_tokens += 1
        text = turn.stops.add(text)
        if is_last:
            text += turn.stops.rest()
        turn.deliver(Piece(text, 1))
        if turn.stops.found:
            self._stop(turn, "stop")

    @staticmethod
    def _stop(turn: _Turn, reason: FinishReason) -> None:
        """Cancels a request in the engine, which reports its end, with the tokens from the cache, in the next run."""
        if turn.ending is None:
            turn.ending = reason
            turn.genai_request.cancel_turn(turn.number)

    def _end(self, turn: _Turn, event: Finished | Failed) -> None:
        """Frees the request's blocks, and delivers its last event."""
        if turn.genai_request is None:
            self._interrupted.remove(turn)
        else:
            self._turns.remove(turn)
            turn.genai_request.close()
        turn.deliver(event)
