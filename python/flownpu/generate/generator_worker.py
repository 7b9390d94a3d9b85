# SPDX-License-Identifier: Apache-2.0
"""The worker for models that are not paged: a GenAI generator for each of a few conversations, stepped in turn."""

import threading
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu.generate.cached_sequence import CachedSequence
from flownpu.generate.guidance import blamed
from flownpu.generate.language_model import LanguageModel
from flownpu.generate.penalties import ChangedLogits
from flownpu.generate.stop_texts import StopTexts
from flownpu.generate.worker import (
    Deliver,
    Event,
    Failed,
    Finished,
    FinishReason,
    Likelihood,
    Piece,
    Request,
    Started,
    Worker,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(eq=False)
class _Slot:
    """A place for one conversation, which is kept when its request has ended."""

    sequence: CachedSequence | None = None
    used: int = 0
    """The number of the request that used it last, counted from 1."""
    busy: bool = False


@dataclass(eq=False)
class _Answer:
    """A request that has a slot."""

    request: Request
    deliver: Deliver
    slot: _Slot
    events: Generator[Event, None, None] = field(init=False)
    cached_tokens: int = 0
    new_tokens: int = 0

    def finished(self, reason: FinishReason, stop_text: str = "") -> Finished:
        return Finished(reason, len(self.request.tokens), self.cached_tokens, self.new_tokens, stop_text)


class GeneratorWorker(Worker):
    """Answers up to `slots` requests at a time, a token of each in turn.

    A request takes the free slot whose sequence shares the longest beginning with it, if that is at least half of the
    prompt or of the slot's sequence: with less, more of another conversation would be lost than gained. Otherwise it
    takes the least recently used slot. A sequence can be continued only with the same sampling and guidance, which
    GenAI's generators cannot change; and a request that is sampled with a seed begins anew, for its tokens depend on
    how many random numbers the generator has drawn before.

    Args:
        model: the model; only this worker's thread calls its generators.
        context: most tokens of a prompt and its answer together; each slot's KV cache has this size.
        slots: requests that are computed at a time, and conversations that are kept.
    """

    gives_likelihoods = True

    def __init__(self, model: LanguageModel, *, context: int, slots: int = 4) -> None:
        super().__init__(model)
        self.context_length = min(context, model.context_length)
        self.slots = slots
        self._places = [_Slot() for _ in range(slots)]
        self._answers: list[_Answer] = []
        self._begun = 0
        self._thread = threading.Thread(target=self._run, name=f"flownpu {model.folder.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._take_requests(idle=not self._answers):
            self._fill_slots()
            for answer in list(self._answers):
                self._step(answer)
        for answer in list(self._answers):
            self._cancel(answer.request)
        self._end_waiting()
        self._places.clear()

    def _cancel(self, request: Request) -> None:
        for answer in list(self._answers):
            if answer.request is request:
                answer.deliver(answer.finished("cancelled"))
                self._end(answer)

    def _fill_slots(self) -> None:
        while self._waiting and len(self._answers) < self.slots:
            request, deliver = self._waiting.popleft()
            slot = self._slot_for(request)
            slot.busy = True
            self._begun += 1
            slot.used = self._begun
            answer = _Answer(request, deliver, slot)
            answer.events = self._answer(answer)
            self._answers.append(answer)

    def _slot_for(self, request: Request) -> _Slot:
        """A free slot that holds a sequence: one that the request continues, or a new one."""
        free = [slot for slot in self._places if not slot.busy]
        best = max(free, key=lambda slot: self._cached_tokens(slot, request))
        common = self._cached_tokens(best, request)
        if best.sequence is not None and common and 2 * common >= min(best.sequence.tokens, len(request.tokens)):
            return best
        slot = min(free, key=lambda slot: slot.used)
        if not self._cached_tokens(slot, request):
            # Frees the slot's KV cache before the next one is allocated.
            slot.sequence = CachedSequence(self.model, self.context_length, request.sampling, request.guidance)
        return slot

    @staticmethod
    def _cached_tokens(slot: _Slot, request: Request) -> int:
        """How many of the prompt's first tokens a slot holds; 0 if the request cannot use its generator."""
        sequence = slot.sequence
        if sequence is None or _depends_on_seed(request) or _echoes_likelihoods(request):
            return 0
        settings = request.sampling.search_options(), request.guidance
        if (sequence.sampling.search_options(), sequence.guidance) != settings:
            return 0
        return sequence.common_tokens(request.tokens, request.images)

    def _step(self, answer: _Answer) -> None:
        """Delivers a request's next event."""
        try:
            event = next(answer.events)
        except Exception as error:  # noqa: BLE001 whatever it is, it ends this request and no other
            answer.slot.sequence = None
            answer.deliver(Failed(blamed(error)))
            self._end(answer)
            return
        answer.deliver(event)
        if isinstance(event, Finished):
            self._end(answer)

    def _end(self, answer: _Answer) -> None:
        # The answer refers to `events`, whose frame refers to the answer and to the KV cache's generator. Unless
        # `events` is closed, this cycle keeps the cache until Python's garbage collection.
        answer.events.close()
        answer.slot.busy = False
        self._answers.remove(answer)

    def _answer(self, answer: _Answer) -> Generator[Event, None, None]:
        """A request's events, one for each step of the model."""
        request, sequence = answer.request, answer.slot.sequence
        assert sequence is not None
        yield Started(len(request.tokens))
        generator, new, unseen = sequence.resume(request.tokens, request.images)
        answer.cached_tokens = len(request.tokens) - len(new)
        if _echoes_likelihoods(request):
            yield from self._echo(request, generator)
        else:
            self.model.append(generator, new, unseen)
            if request.echo:
                text_of = self.model.text_stream()
                yield Piece("".join(text_of(int(token)) for token in request.tokens), 0)
        stops = StopTexts(request.stop)
        limit = min(request.max_new_tokens, self.context_length - len(request.tokens))
        if not limit:
            yield answer.finished("length")
            return
        steps = self.model.steps(generator)
        sampling = request.sampling
        changed: ChangedLogits | None = None
        if sampling.penalties:
            changed = ChangedLogits(sampling.penalties, request.tokens, self.model.temperature(sampling))
        reason: FinishReason | None = None
        while reason is None:
            # Read before the step: guidance and sampling change the logits in place.
            logarithms = _logarithms(generator.get_logits()) if request.alternatives is not None else None
            if changed is not None:
                generator.set_logits(changed.of(generator.get_logits()))
            token, text = next(steps)
            if changed is not None:
                changed.add(token)
            answer.new_tokens += 1
            ended = token in self.model.ending_tokens
            text = stops.add("" if ended else text)
            if ended or stops.found:
                reason = "stop"
            elif answer.new_tokens == limit:
                reason = "length"
            if reason is not None:
                text += stops.rest()
            likelihoods: tuple[tuple[Likelihood, ...], ...] = ()
            if logarithms is not None:
                most = request.alternatives or 0
                likelihoods = (self._likelihoods(logarithms, token, most, begins=answer.new_tokens == 1),)
            yield Piece(text, 1, likelihoods)
        yield answer.finished(reason, stops.found)

    def _echo(self, request: Request, generator: Any) -> Generator[Event, None, None]:
        """Computes a prompt token by token, and delivers each with its likelihood, given those before it."""
        text_of = self.model.text_stream()
        for place, token in enumerate(request.tokens.tolist()):
            if place:
                logarithms = _logarithms(generator.get_logits())
                known = self._likelihoods(logarithms, token, request.alternatives or 0, begins=False)
            else:
                tokenizer = self.model.tokenizer
                text, data = tokenizer.text_of(token, begins=True), tokenizer.bytes_of(token, begins=True)
                known = (Likelihood(token, text, data, None),)
            yield Piece(text_of(token), 0, (known,))
            self.model.append(generator, request.tokens[place : place + 1])

    def _likelihoods(
        self, logarithms: "NDArray[np.float64]", token: int, alternatives: int, *, begins: bool
    ) -> tuple[Likelihood, ...]:
        """The likelihoods of the token that was chosen, and of the `alternatives` likeliest tokens."""
        likeliest = np.argsort(-logarithms, kind="stable")[:alternatives].tolist()
        known = self.model.tokenizer
        return tuple(
            Likelihood(
                one, known.text_of(one, begins=begins), known.bytes_of(one, begins=begins), float(logarithms[one])
            )
            for one in (token, *likeliest)
        )


def _depends_on_seed(request: Request) -> bool:
    return request.sampling.seed is not None and not request.sampling.is_greedy


def _echoes_likelihoods(request: Request) -> bool:
    return request.echo and request.alternatives is not None


def _logarithms(logits: "NDArray[np.float32]") -> "NDArray[np.float64]":
    """The natural logarithm of each token's probability, float64 [V], from logits [V], [1, 1, V] or the like."""
    values: NDArray[np.float64] = logits.reshape(-1).astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    return values
