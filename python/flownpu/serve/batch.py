# SPDX-License-Identifier: Apache-2.0
"""Requests from a file, answers into another one: OpenAI's batch format, on this machine.

A line of the source is {"custom_id", "method": "POST", "url", "body"}, a line of the target {"id", "custom_id",
"response": {"status_code", "request_id", "body"}, "error"}. The target grows by whole lines, in the order in which
requests are answered; requests whose answers it holds already are not asked again.
"""

import asyncio
import json
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from flownpu.errors import FlowNPUError
from flownpu.serve.application import told
from flownpu.serve.errors import ApiError, invalid
from flownpu.serve.requests.openai import ChatRequest, CompletionRequest
from flownpu.serve.requests.responses import ResponsesRequest
from flownpu.serve.routes.openai import chat_completion, completion
from flownpu.serve.routes.responses import response
from flownpu.serve.service import Service
from flownpu.serve.settings import ServerSettings
from flownpu.system import lock

__all__ = ["Batch", "BatchProgress", "run_batch"]

AT_A_TIME = 64
"""Requests that are in flight at once: more than any model has slots, so that no slot idles."""


@dataclass
class BatchProgress:
    """How far a batch has come."""

    total: int
    earlier: int = 0
    """Answers that the target held when the batch began."""
    answered: int = 0
    refused: int = 0
    """How many of the answered requests have an error."""
    new_tokens: int = 0

    @property
    def done(self) -> int:
        """Answers that the target holds."""
        return self.earlier + self.answered


@dataclass(frozen=True)
class Batch:
    """The file of requests (`source`) and the file of their answers (`target`)."""

    source: Path
    target: Path

    def names(self) -> set[str]:
        """The custom_id of every line of the source.

        Raises:
            FlowNPUError: the source is empty, a line is no request, or two lines have the same custom_id.
        """
        names: set[str] = set()
        for number, line in self._lines():
            place = f"{self.source}, line {number}"
            try:
                item = json.loads(line)
            except ValueError as error:
                raise FlowNPUError(f"{place} is not JSON: {error}") from error
            if not isinstance(item, dict) or not isinstance(item.get("custom_id"), str):
                raise FlowNPUError(f'{place}: expected an object with a text "custom_id", as OpenAI\'s batches have it')
            if item["custom_id"] in names:
                raise FlowNPUError(f"{place}: a line before it has the custom_id {item['custom_id']!r}, too")
            names.add(item["custom_id"])
        if not names:
            raise FlowNPUError(f"{self.source} is empty: expected a request a line")
        return names

    def requests(self, without: set[str]) -> Iterator[dict[str, Any]]:
        """The source's requests, except those whose custom_id is in `without`."""
        for _, line in self._lines():
            item: dict[str, Any] = json.loads(line)
            if item["custom_id"] not in without:
                yield item

    def _lines(self) -> Iterator[tuple[int, str]]:
        with self.source.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line


class _Target:
    """The file of answers; it keeps whole lines only."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self.names: set[str] = set()
        end = 0
        for line in file:
            # The last line may be incomplete if the machine lost its power while it was written.
            if not line.endswith(b"\n"):
                break
            end += len(line)
            try:
                self.names.add(json.loads(line)["custom_id"])
            except (ValueError, KeyError, TypeError) as error:
                raise FlowNPUError(f"{path} holds something else than answers of a batch: give another file") from error
        self._cut(end)

    def add(self, item: dict[str, Any]) -> None:
        """Writes a whole line, or nothing.

        Raises:
            FlowNPUError: it cannot be written, for instance because the disk is full.
        """
        line = json.dumps(item, ensure_ascii=False).encode() + b"\n"
        end = self._file.tell()
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError as error:
            self._cut(end)
            raise FlowNPUError(
                f"{self._path} cannot be written: {error.strerror}. What is answered so far is kept: the same command "
                "goes on from there"
            ) from error
        self.names.add(item["custom_id"])

    def keep(self) -> None:
        """Flushes what is written to the disk."""
        os.fsync(self._file.fileno())

    def _cut(self, end: int) -> None:
        self._file.truncate(end)
        self._file.seek(end)


async def run_batch(batch: Batch, settings: ServerSettings, report: Callable[[BatchProgress], None]) -> BatchProgress:
    """Answers the requests of the source whose answers the target does not hold.

    Args:
        batch: source and target.
        settings: models and limits.
        report: called at the beginning and after each answer.

    Raises:
        FlowNPUError: source or target do not have the format; the target cannot be written; a model cannot be loaded
            or failed.
    """
    names = batch.names()
    async with _opened(batch.target) as target:
        progress = BatchProgress(len(names), earlier=len(names & target.names))
        report(progress)
        service = Service(settings)
        try:
            await _answer_all(batch, service, target, progress, report)
        finally:
            await service.close()
            target.keep()
    return progress


@asynccontextmanager
async def _opened(path: Path) -> AsyncIterator[_Target]:
    with path.open("a+b", buffering=0) as file:
        if not lock(file.fileno()):
            raise FlowNPUError(f"another batch writes to {path}: wait for its end, or give another file")
        file.seek(0)
        yield _Target(path, file)


async def _answer_all(
    batch: Batch, service: Service, target: _Target, progress: BatchProgress, report: Callable[[BatchProgress], None]
) -> None:
    room = asyncio.Semaphore(AT_A_TIME)

    async def answer(item: dict[str, Any]) -> None:
        try:
            line = await _answer(item, service)
        finally:
            room.release()
        target.add(line)
        progress.answered += 1
        progress.refused += line["response"]["status_code"] != 200
        usage = line["response"]["body"].get("usage") or {}
        progress.new_tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))
        report(progress)

    try:
        async with asyncio.TaskGroup() as group:
            for item in batch.requests(target.names.copy()):
                await room.acquire()
                group.create_task(answer(item))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors


async def _answer(item: dict[str, Any], service: Service) -> dict[str, Any]:
    try:
        status, body = 200, await _body(item, service)
    except ApiError as error:
        if error.status >= 500:
            # Not the request's fault: nothing is written, so that the next run asks it again.
            raise FlowNPUError(error.message) from error
        status, body = error.status, error.document()
    name = uuid.uuid4().hex
    answer = {"status_code": status, "request_id": f"req_{name}", "body": body}
    return {"id": f"batch_req_{name}", "custom_id": item["custom_id"], "response": answer, "error": None}


async def _body(item: dict[str, Any], service: Service) -> dict[str, Any]:
    body = item.get("body")
    if isinstance(body, dict) and body.get("stream"):
        raise invalid("a batch has no streams: leave stream out", "stream")
    try:
        match item.get("url"):
            case "/v1/chat/completions":
                chat = ChatRequest.model_validate(body)
                return await chat_completion(await service.chat(chat), chat)
            case "/v1/completions":
                prompts = CompletionRequest.model_validate(body)
                return await completion(await service.complete(prompts), prompts)
            case "/v1/responses":
                asked = ResponsesRequest.model_validate(body)
                return await response(await service.chat(asked.request()), asked)
            case url:
                raise invalid(
                    f"no such url in a batch: {url!r}; there is /v1/chat/completions, /v1/completions, /v1/responses"
                )
    except ValidationError as error:
        raise told(error) from error
