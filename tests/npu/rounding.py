# SPDX-License-Identifier: Apache-2.0
"""What the array's roundings do to a model's logits, found by making errors of their size in transformers' model."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from tests.end_to_end.test_numbers import ROUNDING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import transformers

# The matrix unit reads 8 neighbours with one exponent (aie/kernels/README.md). The unit of a mantissa is 2^-6 of the
# largest's power of two, whose rms is 1.38 of the rms of normal numbers; errors are evenly spread over a unit.
BLOCK_ROUNDING = 1.38 * 2.0**-6 / math.sqrt(12)
# Models with errors of their own. Of the rms of twice some hundred logits chance is less than a tenth.
COPIES = 2


def array_error(
    model: transformers.PreTrainedModel, ids: np.ndarray, positions: Sequence[int], *, prompt: bool, seed: int = 0
) -> float:
    """The rms error of the logits at some positions.

    To bf16 are rounded: the residual stream after a layer's additions, what norms make, products, attention's output,
    and with it attention's weights. With `prompt`, as if all tokens went through the prefill calls, in blocks: both
    factors of a product (an error of the product's own rms), queries and keys, and attention's weights and values. All
    of these are independent of each other; the errors of the model's own float32 are a ten-thousandth of them.

    Args:
        model: in float32, with the weights that Q4NX made.
        ids: tokens [S].
        positions: of the logits.
        prompt: see above.
        seed: of the errors.
    """
    tokens = torch.from_numpy(ids)[None]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        exact = model(tokens).logits[0, list(positions)]
        errors = []
        for _ in range(COPIES):
            with ExitStack() as stack:
                for hook in _hooks(model, generator, prompt):
                    stack.callback(hook.remove)
                errors.append(model(tokens).logits[0, list(positions)] - exact)
    return float(torch.stack(errors).square().mean().sqrt())


def _hooks(model: Any, generator: torch.Generator, prompt: bool) -> list[Any]:
    rounding, block = ROUNDING["bf16"], BLOCK_ROUNDING if prompt else 0.0

    def noise(values: torch.Tensor) -> torch.Tensor:
        return torch.randn(values.shape, generator=generator)

    def rounded(values: torch.Tensor) -> torch.Tensor:
        return values * (1 + rounding * noise(values))

    def off(values: torch.Tensor, share: float) -> torch.Tensor:
        """By a share of the rms of a token's values."""
        return values + share * values.square().mean(-1, keepdim=True).sqrt() * noise(values)

    def after(_module: Any, _arguments: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return rounded(output[0]), *output[1:]
        return rounded(output)

    def product(name: str) -> Any:
        share = block * math.sqrt(2 + name.endswith(("q_proj", "k_proj")))
        return lambda _module, _arguments, output: off(rounded(output), share)

    def context(_module: Any, arguments: Any) -> Any:
        return (off(rounded(rounded(arguments[0])), block * math.sqrt(2)),)

    hooks = []
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            hooks.append(module.register_forward_hook(product(name)))
            if name.endswith("o_proj"):
                hooks.append(module.register_forward_pre_hook(context))
        elif name.endswith(("norm", "lm_head")):
            hooks.append(module.register_forward_hook(after))
    # The additions after attention and after the feed-forward network.
    hooks += [layer.register_forward_hook(after) for layer in model.model.layers for _ in range(2)]
    return hooks
