# SPDX-License-Identifier: Apache-2.0
"""Requests from a file, answers into another one: OpenAI's batch format, on this machine.

A line of the source is {"custom_id", "method": "POST", "url", "body"}, a line of the target {"id", "custom_id",
"response": {"request_id", "status_code", "body"}, "error"}; a response may have "headers", too. The target grows by
whole lines, in the order in which requests are answered; requests whose answers it holds already are not asked again. A
request that fails is asked once more, alone; then the error is its answer.
"""

import asyncio
import io
import json
import logging
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flownpu.errors import FlowNPUError
from flownpu.serve.errors import ApiError, invalid, mistake
from flownpu.serve.requests.openai import ChatRequest, CompletionRequest
from flownpu.serve.requests.reading import read_document
from flownpu.serve.requests.responses import ResponsesRequest
from flownpu.serve.requests.validation import validated
from flownpu.serve.routes.openai import chat_completion, completion
from flownpu.serve.routes.responses import begun, response
from flownpu.serve.service import Chat, Service
from flownpu.serve.settings import ServerSettings
from flownpu.system import lock

log = logging.getLogger(__name__)

AT_A_TIME = 64
"""Requests that are in flight at once: more than any model has slots, so that no slot idles."""
BEGINNING = b'{"id": "batch_req_'
"""How each line of a target begins: `_line` writes it, and a foreign file's last line does not have it."""


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
        for number, item in self._items():
            place = f"{self.source}, line {number}"
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
        for _, item in self._items():
            if item["custom_id"] not in without:
                yield item

    def check_files(self) -> None:
        """Checks the files behind the two paths before either is opened.

        Raises:
            FlowNPUError: one is a device, a pipe or a folder, or both are the same file.
        """
        for path in (self.source, self.target):
            if path.exists() and not path.is_file():
                raise FlowNPUError(f"{path} is no file: a batch reads its files more than once")
        if self.source.exists() and self.target.exists() and self.source.samefile(self.target):
            raise FlowNPUError(f"{self.target} is the file of the requests: give another one for their answers")

    def _items(self) -> Iterator[tuple[int, Any]]:
        with self.source.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    yield number, read_document(line)
                except FlowNPUError as error:
                    raise FlowNPUError(f"{self.source}, line {number} is {error}") from error


class _Target:
    """The file of answers; it keeps whole lines only. A file of something else is refused as it is."""

    def __init__(self, path: Path, file: io.FileIO) -> None:
        self._path = path
        self._file = file
        self.names: set[str] = set()
        end, last = 0, b"\n"
        reader = io.BufferedReader(file)  # an unbuffered file would read each byte by itself
        for line in reader:
            if self._is_cut_short(line):
                break
            end, last = end + len(line), line
        reader.detach()
        self._cut(end)
        if not last.endswith(b"\n"):  # an editor removed the last line's end
            self._write(b"\n")

    def add(self, item: dict[str, Any]) -> None:
        """Writes a whole line, or nothing.

        Raises:
            FlowNPUError: it cannot be written, for instance because the disk is full.
        """
        self._write(json.dumps(item, ensure_ascii=False).encode() + b"\n")
        self.names.add(item["custom_id"])

    def keep(self) -> None:
        """Flushes what is written to the disk.

        Raises:
            FlowNPUError: it cannot be written: some file systems notice only now that a disk is full.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._unwritable(error) from error

    def _is_cut_short(self, line: bytes) -> bool:
        """Whether it is the beginning of an answer, left by a power cut. Adds the custom_id of a complete answer.

        Raises:
            FlowNPUError: it is neither.
        """
        try:
            item = json.loads(line)
            item["response"]  # a request has a custom_id, and no response
            self.names.add(item["custom_id"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            rest = line.rstrip(b"\0")  # file systems may leave zeros in place of data that was not yet written
            if BEGINNING.startswith(rest[: len(BEGINNING)]) and not line.endswith(b"\n") and (rest or self.names):
                return True
            raise FlowNPUError(
                f"{self._path} holds something else than answers of a batch: give another file"
            ) from error
        return False

    def _write(self, line: bytes) -> None:
        end = self._file.tell()
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError as error:
            self._cut(end)
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> FlowNPUError:
        return FlowNPUError(
            f"{self._path} cannot be written: {error.strerror}. What is answered so far is kept: the same command goes "
            "on from there"
        )

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
        FlowNPUError: source or target do not have the format or cannot be read; the target cannot be written; a model
            cannot be loaded.
    """
    batch.check_files()
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
    failed: list[dict[str, Any]] = []

    def keep(item: dict[str, Any], answer: dict[str, Any]) -> None:
        target.add(_line(item["custom_id"], answer))
        progress.answered += 1
        progress.refused += answer["status_code"] != 200
        usage = answer["body"].get("usage") or {}
        progress.new_tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))
        report(progress)

    async def ask(item: dict[str, Any]) -> None:
        try:
            answer = await _answer(item, service)
        finally:
            room.release()
        if answer["status_code"] >= 500:
            failed.append(item)
        else:
            keep(item, answer)

    try:
        async with asyncio.TaskGroup() as group:
            for item in batch.requests(target.names.copy()):
                await room.acquire()
                group.create_task(ask(item))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    # If a model's process ended, all of its requests failed. Asked alone, only the request that ended it fails again.
    for item in failed:
        keep(item, await _answer(item, service))


def _line(custom_id: str, answer: dict[str, Any]) -> dict[str, Any]:
    name = uuid.uuid4().hex
    return {
        "id": f"batch_req_{name}",
        "custom_id": custom_id,
        "response": {"request_id": f"req_{name}", **answer},
        "error": None,
    }


async def _answer(item: dict[str, Any], service: Service) -> dict[str, Any]:
    """The status, the document and, if there are any, the headers of an answer or of the error in its place.

    Raises:
        FlowNPUError: a model cannot be loaded. Nothing is written then, so that the next run asks again.
    """
    try:
        chat, document = await _chat_and_document(item, service)
    except ApiError as error:
        if error.status == 503:
            raise FlowNPUError(error.message) from error
        failure = error
    except Exception:  # any such error ends only this request
        log.exception("the request %s failed", item["custom_id"])
        failure = mistake()
    else:
        return {"status_code": 200, "body": document, **({"headers": chat.headers} if chat.headers else {})}
    return {"status_code": failure.status, "body": failure.document()}


async def _chat_and_document(item: dict[str, Any], service: Service) -> tuple[Chat, dict[str, Any]]:
    body = item.get("body")
    if isinstance(body, dict) and body.get("stream"):
        raise invalid("a batch has no streams: leave stream out", "stream")
    match item.get("url"):
        case "/v1/chat/completions":
            request = validated(ChatRequest, body)
            chat = await service.chat(request)
            return chat, await chat_completion(chat, request)
        case "/v1/completions":
            prompts = validated(CompletionRequest, body)
            chat = await service.complete(prompts)
            return chat, await completion(chat, prompts)
        case "/v1/responses":
            asked = validated(ResponsesRequest, body)
            chat = await begun(service, asked)
            return chat, await response(chat, asked)
        case url:
            raise invalid(
                f"no such url in a batch: {url!r}; there is /v1/chat/completions, /v1/completions, /v1/responses"
            )
