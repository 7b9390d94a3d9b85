# SPDX-License-Identifier: Apache-2.0
"""Estimates the array's errors in logits and in an encoder's features: puts its roundings into transformers' model."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tests.end_to_end.test_numbers import ROUNDING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import transformers

# The matrix unit reads 8 neighbours with one shared exponent (aie/kernels/README.md). A mantissa's unit is 2^-6 of the
# largest neighbour's power of two. For normally distributed numbers the rms of that power is 1.38 times the numbers'
# rms, and errors are evenly spread over a unit.
BLOCK_ROUNDING = 1.38 * 2.0**-6 / math.sqrt(12)
# Runs with independent errors. By chance the rms of two runs' errors in some hundred logits varies less than a tenth.
COPIES = 2


def array_error(
    model: transformers.PreTrainedModel, ids: np.ndarray, positions: Sequence[int], *, prompt: bool,
    int8_cache: bool = False, seed: int = 0,
) -> float:  # fmt: skip
    """The rms error of the logits at some positions.

    Rounded to bf16 are the residual stream after a layer's additions, the results of norms and products, attention's
    output, and with it attention's weights. With `prompt`, as if all tokens went through the prefill calls, these are
    rounded to blocks with a shared exponent as well: both factors of a product (the error is a share of the product's
    rms), queries and keys, and attention's weights and values. With `int8_cache` keys and values, a token's own, too,
    are rounded to steps of a 127th of their head's largest element. All errors are independent of each other; those of
    the model's own float32 are a ten-thousandth of them.

    Args:
        model: in float32, with the weights that Q4NX made.
        ids: tokens [S].
        positions: of the logits.
        prompt: see above.
        int8_cache: see above.
        seed: of the errors.
    """
    tokens = torch.from_numpy(ids)[None]

    def logits() -> torch.Tensor:
        return model(tokens).logits[0, list(positions)]  # type: ignore[no-any-return]

    return decoder_error(model, logits, prompt=prompt, int8_cache=int8_cache, seed=seed)


def decoder_error(
    model: Any, run: Callable[[], torch.Tensor], *, prompt: bool, int8_cache: bool = False, seed: int = 0
) -> float:
    """Like `array_error`, for any computation `run` with the model, which may take images."""
    return _error(run, lambda noise: _decoder_hooks(model, noise, prompt, int8_cache), seed)


def encoder_error(model: transformers.Gemma3ForConditionalGeneration, pixels: np.ndarray, *, seed: int = 0) -> float:
    """The rms error of the features of images [N, 3, I, I].

    Like `array_error` of a prompt; pixels, the results of GELU and pooled tokens are rounded to bf16 as well.
    """
    images = torch.from_numpy(pixels)

    def features() -> torch.Tensor:
        return model.model.get_image_features(images).pooler_output

    return _error(features, lambda noise: _encoder_hooks(model.model, noise), seed)


def _error(run: Callable[[], torch.Tensor], hooks: Callable[[_Noise], list[Any]], seed: int) -> float:
    """The rms error of a run's result when `hooks` put errors into the model."""
    noise = _Noise(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        exact = run()
        errors = []
        for _ in range(COPIES):
            with ExitStack() as stack:
                for hook in hooks(noise):
                    stack.callback(hook.remove)
                errors.append(run() - exact)
    return float(torch.stack(errors).square().mean().sqrt())


@dataclass
class _Noise:
    """Independent, normally distributed errors, and hooks that add them."""

    generator: torch.Generator

    def _normal(self, values: torch.Tensor) -> torch.Tensor:
        return torch.randn(values.shape, generator=self.generator)

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """The values with the errors of a rounding to bf16."""
        return values * (1 + ROUNDING["bf16"] * self._normal(values))

    def off(self, values: torch.Tensor, share: float) -> torch.Tensor:
        """The values with errors that are a share of the rms of each token's values."""
        return values + share * values.square().mean(-1, keepdim=True).sqrt() * self._normal(values)

    def after(self, _module: Any, _arguments: Any, output: Any) -> Any:
        """Rounds the output of a module."""
        if isinstance(output, tuple):
            return self.rounded(output[0]), *output[1:]
        return self.rounded(output)

    def before(self, _module: Any, arguments: Any) -> Any:
        """Rounds the input of a module."""
        return (self.rounded(arguments[0]), *arguments[1:])

    def product(self, name: str, block: float) -> Any:
        """A hook for the product of this name: both factors are rounded in blocks, and queries and keys afterwards."""
        share = block * math.sqrt(2 + name.endswith(("q_proj", "k_proj")))
        return lambda _module, _arguments, output: self.off(self.rounded(output), share)

    def codes(self, size: int) -> Any:
        """A hook for keys or values, heads of `size` elements: each is rounded to 127ths of its largest magnitude.

        Norms and RoPE of keys, which come afterwards, change a head's largest element and its errors about alike.
        """

        def change(_module: Any, _arguments: Any, output: torch.Tensor) -> torch.Tensor:
            heads = output.unflatten(-1, (-1, size))
            step = heads.abs().amax(-1, keepdim=True) / 127
            return output + (step / math.sqrt(12) * self._normal(heads)).flatten(-2)

        return change

    def context(self, block: float) -> Any:
        """A hook for attention's output: its weights and itself are rounded, and weights and values in blocks."""

        def change(_module: Any, arguments: Any) -> Any:
            return (self.off(self.rounded(self.rounded(arguments[0])), block * math.sqrt(2)),)

        return change


def _decoder_hooks(model: Any, noise: _Noise, prompt: bool, int8_cache: bool) -> list[Any]:
    block = BLOCK_ROUNDING if prompt else 0.0
    hooks = []
    for name, module in model.named_modules():
        if "vision_tower" in name or "projector" in name:
            continue  # an encoder's
        if name.endswith("_proj"):
            hooks.append(module.register_forward_hook(noise.product(name, block)))
            if int8_cache and name.endswith(("k_proj", "v_proj")):
                hooks.append(module.register_forward_hook(noise.codes(model.config.head_dim)))
            if name.endswith("o_proj"):
                hooks.append(module.register_forward_pre_hook(noise.context(block)))
        elif name.endswith(("norm", "lm_head")):
            hooks.append(module.register_forward_hook(noise.after))
    # The additions after attention and after the feed-forward network.
    layers = getattr(model.model, "language_model", model.model).layers
    hooks += [layer.register_forward_hook(noise.after) for layer in layers for _ in range(2)]
    return hooks


def _encoder_hooks(model: Any, noise: _Noise) -> list[Any]:
    tower, projector = model.vision_tower, model.multi_modal_projector
    hooks = []
    for name, module in tower.named_modules():
        if name.endswith(("_proj", "fc1", "fc2")):
            hooks.append(module.register_forward_hook(noise.product(name, BLOCK_ROUNDING)))
            if name.endswith("out_proj"):
                hooks.append(module.register_forward_pre_hook(noise.context(BLOCK_ROUNDING)))
            if name.endswith("fc2"):
                hooks.append(module.register_forward_pre_hook(noise.before))
        elif name.endswith(("layer_norm1", "layer_norm2", "post_layernorm", "embeddings")):
            hooks.append(module.register_forward_hook(noise.after))
        elif name.endswith("encoder.layers"):
            hooks += [layer.register_forward_hook(noise.after) for layer in module for _ in range(2)]
        elif name.endswith("patch_embedding"):

            def patches(_module: Any, _arguments: Any, output: torch.Tensor) -> torch.Tensor:
                """Channels are the second axis here."""
                values = output.movedim(1, -1)
                return noise.off(noise.rounded(values), BLOCK_ROUNDING * math.sqrt(2)).movedim(-1, 1)

            hooks += [module.register_forward_hook(patches), module.register_forward_pre_hook(noise.before)]
    hooks.append(projector.mm_soft_emb_norm.register_forward_hook(noise.after))
    hooks.append(projector.register_forward_hook(noise.product("projector", BLOCK_ROUNDING)))
    return hooks
