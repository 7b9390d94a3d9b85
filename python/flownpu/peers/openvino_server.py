# SPDX-License-Identifier: Apache-2.0
"""Serves OpenVINO GenAI's continuous batching pipeline, as far as `flownpu bench --serve` uses `/v1/completions`.

A prompt is one list of tokens, an answer is a stream; the text of token 7 is "<7>". The pipeline is that of
`openvino_genai.py`: its scheduler takes requests between two of its steps, with a prefix cache.

    python -P openvino_server.py MODEL PORT THREADS TOKENS

TOKENS is how many tokens the KV cache holds. Runs in this peer's own environment.
"""

import asyncio
import json
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Tokens in a block of the paged KV cache on the CPU.
_KV_BLOCK = 32
# Most tokens of a step, of prompts and answers together: GenAI's default.
_BATCHED_TOKENS = 256
# A pause after each step, in which the event loop sends the step's tokens; a step takes tens of milliseconds.
_SENDING_SECONDS = 0.001


@dataclass(eq=False)
class _Request:
    """A request for one answer. `answers` gets its tokens on the event loop, and None at its end."""

    tokens: Any
    new: int
    loop: asyncio.AbstractEventLoop
    answers: "asyncio.Queue[list[int] | None]"
    handle: Any = None

    def say(self, tokens: list[int] | None) -> None:
        self.loop.call_soon_threadsafe(self.answers.put_nowait, tokens)


class Pipeline:
    """The pipeline, and the thread that steps it."""

    def __init__(self, folder: Path, threads: int, tokens: int) -> None:
        import openvino  # noqa: PLC0415 only this peer's environment has it
        import openvino_genai  # noqa: PLC0415

        self._openvino: Any = openvino
        self._genai: Any = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = _BATCHED_TOKENS
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        scheduler.num_kv_blocks = -(-tokens // _KV_BLOCK)
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            folder, openvino_genai.Tokenizer(folder), scheduler, "CPU", INFERENCE_NUM_THREADS=threads
        )
        self._arrived: queue.Queue[_Request] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, request: _Request) -> None:
        """Answers a request; may be called from any thread."""
        self._arrived.put(request)

    def _run(self) -> None:
        requests: list[_Request] = []
        number = 0
        while True:
            while not requests or not self._arrived.empty():
                request = self._arrived.get()
                number += 1
                # GenAI demands a token that ends the text, though it is ignored.
                settings = self._genai.GenerationConfig(
                    max_new_tokens=request.new, ignore_eos=True, eos_token_id=0, do_sample=False
                )
                tokens = self._openvino.Tensor(request.tokens)
                request.handle = self._pipeline.add_request(number, tokens, settings)
                requests.append(request)
            self._pipeline.step()
            for request in list(requests):
                if request.handle.can_read():
                    for output in request.handle.read().values():
                        request.say([int(token) for token in output.generated_ids])
                if request.handle.get_status() != self._genai.GenerationStatus.RUNNING:
                    requests.remove(request)
                    request.say(None)
            # A step may hold Python's lock all the time: the event loop must send the tokens before the next one.
            time.sleep(_SENDING_SECONDS)


def application(pipeline: Pipeline) -> Any:
    """The server as an ASGI application."""
    import numpy as np  # noqa: PLC0415 so that an import of this file needs the standard library alone
    from starlette.applications import Starlette  # noqa: PLC0415
    from starlette.responses import JSONResponse, StreamingResponse  # noqa: PLC0415
    from starlette.routing import Route  # noqa: PLC0415

    async def health(_request: Any) -> Any:
        return JSONResponse({})

    async def models(_request: Any) -> Any:
        return JSONResponse({"object": "list", "data": [{"id": "model", "object": "model"}]})

    async def completions(request: Any) -> Any:
        body = await request.json()
        tokens = np.array([body["prompt"]], np.int64)
        asked = _Request(tokens, int(body["max_tokens"]), asyncio.get_running_loop(), asyncio.Queue())
        pipeline.submit(asked)
        return StreamingResponse(_events(asked), media_type="text/event-stream")

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/completions", completions, methods=["POST"]),
        ]
    )


async def _events(request: _Request) -> AsyncIterator[str]:
    head = {"id": "completion", "object": "text_completion", "created": 0, "model": "model"}
    count = 0
    while (tokens := await request.answers.get()) is not None:
        count += len(tokens)
        choice = {"index": 0, "text": "".join(f"<{token}>" for token in tokens), "finish_reason": None}
        yield _event({**head, "choices": [choice]})
    yield _event({**head, "choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    prompt = request.tokens.shape[1]
    usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
    yield _event({**head, "choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document)}\n\n"


def main() -> None:
    """Runs the command line."""
    import uvicorn  # noqa: PLC0415

    folder, port, threads, tokens = sys.argv[1:]
    pipeline = Pipeline(Path(folder), int(threads), int(tokens))
    uvicorn.run(application(pipeline), host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main()
