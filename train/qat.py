"""Quantisation-aware training of weights: the passes see them as the release stores them, the masters get the gradient (§5).

What the caches hold is quantised by the forward pass itself, as its `Policy` says.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Float

from dsv41.params import ParamSpec, Stored, TextParams, map_specs
from dsv41.quant import ENGRAM_ROW, EXPERT_WEIGHT, dequantize_tiles, fake_quant, quantize_tiles


@jax.custom_jvp
def fake_quant_tiles(weight: Float[Array, "*s o i"]) -> Float[Array, "*s o i"]:
    """Matrices as FP8 with a scale for each 32 x 32 tile; the gradient is the identity (architecture §8.4)."""
    one = lambda w: dequantize_tiles(*quantize_tiles(w)).astype(w.dtype)  # noqa: E731
    return jax.vmap(one)(weight.reshape(-1, *weight.shape[-2:])).reshape(weight.shape)


@fake_quant_tiles.defjvp
def _(primals: tuple, tangents: tuple) -> tuple:
    return fake_quant_tiles(*primals), tangents[0]


_FORMS = {
    "fp8": fake_quant_tiles,
    "fp4": partial(fake_quant, fmt=EXPERT_WEIGHT),
    "fp8_rows": partial(fake_quant, fmt=ENGRAM_ROW),
}


def fake_quantized(params: TextParams, specs: Any, stored: Collection[Stored]) -> TextParams:
    """The weights, those that the release stores in one of the forms ``stored`` as it would give them back (training §5).

    params: float32 masters; a table may hold some of its rows. The gradient of a master is that of the form it stands in.
    """
    if not stored:
        return params

    def one(spec: ParamSpec, weight: Any) -> Any:
        return _FORMS[spec.stored](weight) if spec.stored in stored else weight

    return map_specs(one, specs, params)
