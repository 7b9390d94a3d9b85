# SPDX-License-Identifier: Apache-2.0
"""llama.cpp on the CPU, with flash attention, for `python -m benchmarks.engines.decoders MODEL --llama-cpp MODEL.gguf`.

    CMAKE_ARGS="-DGGML_NATIVE=ON -DMTMD_BUILD=OFF" pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36

builds it for this processor; with AMX set CC and CXX to clang's: in GCC 12 `_tile_loadconfig` is declared to read 8
of its 64 bytes, so that the others are not written before it and llama.cpp ends by SIGILL. `flownpu convert` reads
the same GGUF file; weights of Q4_0 then have the same values. It is called through ctypes, so that it can be fed
random token ids like all engines.
"""

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

# Most tokens of one call of llama_decode, and of one graph that it computes: llama-bench's defaults.
_BATCH, _MICRO_BATCH = 2048, 512


class Engine:
    """A GGUF file opened in llama.cpp."""

    def __init__(self, model: Path, *, threads: int, context: int, options: dict[str, str]) -> None:
        del options  # there are none
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        self._llama: Any = llama_cpp
        llama_cpp.llama_backend_init()
        loaded = llama_cpp.llama_model_load_from_file(str(model).encode(), llama_cpp.llama_model_default_params())
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = context
        parameters.n_batch, parameters.n_ubatch = _BATCH, _MICRO_BATCH
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.flash_attn_type = 1  # on
        # Layers with a window keep a cache of the window's size only, the default of llama.cpp's own programs.
        parameters.swa_full = False
        self._context = llama_cpp.llama_init_from_model(loaded, parameters)
        if not self._context:
            raise RuntimeError("llama.cpp could not load the model; what it says is above")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(loaded))

    def start(self, length: int) -> None:
        """Begins a sequence."""
        del length  # the context has room for the longest
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)
        self._pending: list[int] = []

    def read(self, tokens: Any) -> None:
        """Computes tokens, up to the logits of the last."""
        for first in range(0, len(tokens), _BATCH):
            part = np.ascontiguousarray(tokens[first : first + _BATCH], dtype=np.int32)
            ids = part.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
            status = self._llama.llama_decode(self._context, self._llama.llama_batch_get_one(ids, len(part)))
            if status:
                raise RuntimeError(f"llama_decode returned {status}")

    def generate_next(self) -> int:
        """Generates the likeliest token; like GenAI, it first computes the token that was generated before."""
        self.read(self._pending)
        token = int(self.logits().argmax())
        self._pending = [token]
        return token

    def logits(self) -> Any:
        """The last token's logits, float32 [V]."""
        pointer = self._llama.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(pointer, (self._vocabulary,))
