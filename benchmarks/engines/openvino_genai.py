# SPDX-License-Identifier: Apache-2.0
"""OpenVINO GenAI on the CPU, for `python -m benchmarks.engines.decoders MODEL --openvino FOLDER`.

    pip install openvino-genai==2026.4.1.0 optimum-intel==2.2.0 nncf==3.4.0
    optimum-cli export openvino -m CHECKPOINT --weight-format int4 --sym --group-size 32 FOLDER

installs it and writes the folder. The model runs in GenAI's continuous batching pipeline, with PagedAttention and with
default precisions: int8 activations in groups, bf16 where the processor has it, an int8 KV cache. `--openvino` takes a
GGUF file, too, of Llama's form with a byte-level tokenizer, in Q4_0, Q4_1, Q4_K, Q6_K and Q8_0.
"""

from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

# Tokens in a block of the paged KV cache on the CPU.
_KV_BLOCK = 32


class Engine:
    """A model opened in GenAI's continuous batching pipeline; each step of the pipeline is one pass of the model."""

    def __init__(self, model: Path, *, threads: int, context: int, options: dict[str, str]) -> None:
        """Opens the model; `options` are OpenVINO's properties of the device."""
        self.version = f"openvino-genai {openvino_genai.__version__}"
        self._tensor: Any = openvino.Tensor
        self._settings: Any = openvino_genai.GenerationConfig
        scheduler = openvino_genai.SchedulerConfig()
        # A prompt is one pass. The cache has room for a request and for the prefix of an earlier one, which `read`
        # continues.
        scheduler.max_num_batched_tokens = context
        scheduler.enable_prefix_caching = True
        scheduler.num_kv_blocks = 2 * -(-context // _KV_BLOCK) + 1
        self._pending: int | None = None
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads, **options}
        )
        self._requests = 0
        self._handle: Any = None

    def start(self, length: int) -> None:
        """Begins a sequence of up to `length` tokens."""
        if self._handle is not None:
            self._handle.cancel()
            self._pipeline.step()
        self._length = length
        self._read = np.empty(0, np.int64)
        self._handle = None

    def read(self, tokens: Any) -> None:
        """Computes tokens, and generates one; tokens that were read before come from the prefix cache."""
        if self._handle is not None:
            self._handle.cancel()
            self._pipeline.step()
        self._read = np.concatenate([self._read, tokens.astype(np.int64)])
        count = self._length - len(self._read)
        # GenAI demands a token that ends the text, though it is ignored.
        settings = self._settings(max_new_tokens=count, ignore_eos=True, eos_token_id=0, do_sample=False)
        self._requests += 1
        self._handle = self._pipeline.add_request(self._requests, self._tensor(self._read[None]), settings)
        self._pipeline.step()
        self._pending = self._token()

    def generate_next(self) -> int:
        """Generates a token; the first one came with the prompt."""
        if self._pending is None:
            self._pipeline.step()
            self._pending = self._token()
        token, self._pending = self._pending, None
        return token

    def _token(self) -> int:
        (output,) = self._handle.read().values()
        return int(output.generated_ids[-1])
