# SPDX-License-Identifier: Apache-2.0
"""Writes the weights of a converted model as a `.q4nx` file, with the names and numbers of FastFlowLM's converter.

model.layers.0.self_attn.q_proj.weight   int8, wide blocks; packed QKV and gate/up pairs are separated
lm_head.weight                           int8, wide blocks; with tied embeddings, those of the embedding
model.embed_tokens.weight                bfloat16, dequantised; in Gemma times sqrt(hidden size)
norms                                    bfloat16, the factors themselves: in Gemma with 1 added
rope_freqs.weight                        bfloat16, in Llama only: the divisors of the rotary frequencies
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu.convert.errors import ConversionError
from flownpu.convert.progress import Stage, silent
from flownpu.model.converted import ConvertedModel
from flownpu.model.folder import read_genai_config
from flownpu.ops import q4nx, q4nx_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from flownpu.convert.progress import ProgressCallback
    from flownpu.model.converted import WeightRows

# The families that both FastFlowLM's converter and this package convert.
_FAMILIES = ("gemma3_text", "llama", "qwen3")
# How many rows are dequantised or packed at once, a multiple of 32: 8192 columns take 8 MB of float32.
_ROWS_AT_ONCE = 256


def export_q4nx(model: Path, output: Path, *, force: bool = False, progress: ProgressCallback = silent) -> None:
    """Writes a `.q4nx` file.

    Args:
        model: a folder that `flownpu convert` made of a checkpoint or a GGUF file.
        output: the file to write.
        force: replace an existing file.
        progress: called with a `Progress` whenever a part of the work is done.

    Raises:
        ConversionError: the format has no form for the model's family or for weights of 8 bits, or the file exists or
            cannot be written.
        FlowNPUError: the folder holds no model that `flownpu convert` made of a checkpoint or a GGUF file.
        MissingDependencyError: onnx_ir is not installed.
    """
    family = read_genai_config(model)["model"]["type"]
    if family not in _FAMILIES:
        raise ConversionError(
            f"{model}: expected a model of {', '.join(_FAMILIES)}, got {family}, which has no .q4nx form"
        )
    source = ConvertedModel(model)
    entries = _Entries(source).entries()
    counter = Stage(progress, "write", sum(entry.size for entry in entries.values()), "B")
    counted = {name: _counted(entry, counter) for name, entry in entries.items()}
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        q4nx_file.write_entries(output, counted, force=force)
    except FileExistsError:
        raise ConversionError(f"{output} exists; give another output, or --force to replace it") from None
    except OSError as error:
        raise ConversionError(f"{output}: cannot be written: {error}") from error


class _Entries:
    def __init__(self, model: ConvertedModel) -> None:
        self.model = model

    def entries(self) -> dict[str, q4nx_file.Entry]:
        """The file's tensors by name."""
        found = {}
        for part in self.model.projections():
            if part.name == "embed_tokens":
                found["model.embed_tokens.weight"] = self._embedding(part)
                if self.model.tied_embeddings:
                    found["lm_head.weight"] = self._blocks(part)
            else:
                found[("" if part.name == "lm_head" else "model.") + f"{part.name}.weight"] = self._blocks(part)
        for name, values in self.model.vectors().items():
            if not name.startswith("rotary."):
                found[f"model.{name}.weight"] = _vector(values)
        if self.model.family == "llama":
            found["rope_freqs.weight"] = _vector(self._rope_factors())
        return found

    def _blocks(self, part: WeightRows) -> q4nx_file.Entry:
        rows, columns, _ = q4nx.blocks_shape(part.rows, part.columns)
        if self.model.quantized(part.initializer, part.first, part.first + 1, part.columns).bits != 4:
            raise ConversionError(
                f"{self.model.folder}: expected weights of 4 bits, as .q4nx files have, got {part.name} of 8; convert "
                "the source with --weights q4"
            )

        def parts() -> Iterator[NDArray[Any]]:
            for start in range(0, part.rows, _ROWS_AT_ONCE):
                stop = min(start + _ROWS_AT_ONCE, part.rows)
                first, last = part.first + start, part.first + stop
                yield q4nx.pack(*self.model.quantized(part.initializer, first, last, part.columns))

        return q4nx_file.Entry("I8", (rows * columns, q4nx.BLOCK_BYTES), parts)

    def _embedding(self, part: WeightRows) -> q4nx_file.Entry:
        scale = np.float32(self.model.embedding_scale)

        def parts() -> Iterator[NDArray[Any]]:
            for start in range(0, part.rows, _ROWS_AT_ONCE):
                stop = min(start + _ROWS_AT_ONCE, part.rows)
                codes = self.model.quantized(part.initializer, start, stop, part.columns)
                yield (scale * q4nx.dequantize_codes(codes)).astype(q4nx.BFLOAT16)

        return q4nx_file.Entry("BF16", (part.rows, part.columns), parts)

    def _rope_factors(self) -> NDArray[np.float32]:
        """The divisors [d/2] that make the model's rotary frequencies of the plain ones, theta^(-2i/d).

        theta is found from the model's frequencies: a plain one is theta^(2/d) times the next. So is a scaled one if
        both have the same divisor; where Llama's divisors grow, the ratio is larger. So the least ratio is theta^(2/d).
        """
        frequencies = self.model.vectors()["rotary.0"].astype(np.float64)
        ratio = (frequencies[:-1] / frequencies[1:]).min(initial=np.inf)
        factors: NDArray[np.float32] = (ratio ** -np.arange(len(frequencies)) / frequencies).astype(np.float32)
        return factors


def _vector(values: NDArray[np.float32]) -> q4nx_file.Entry:
    return q4nx_file.Entry("BF16", values.shape, lambda: [values.astype(q4nx.BFLOAT16)])


def _counted(entry: q4nx_file.Entry, counter: Stage) -> q4nx_file.Entry:
    def parts() -> Iterator[NDArray[Any]]:
        for part in entry.parts():
            yield part
            counter.advance(part.nbytes)

    return entry._replace(parts=parts)
