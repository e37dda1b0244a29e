"""Dtype policy and the small numeric pieces every step shares: linear, RMSNorm, clamped SwiGLU, softmax with a sink."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

Taps = dict[str, Any]


@dataclass(frozen=True)
class Policy:
    """Static numerics of a forward pass: compute dtype, and which of §8's cache quantisers are on.

    In training also: candidate_pool, whether Reindex layers select within the pool or from all that is visible (§7);
    index_teacher, whose attention an indexer learns from, its own layer's or the mean over all layers that read its
    selection (training §4.3); remat, what the backward pass computes again, without selecting again.
    """

    compute_dtype: Any = jnp.float32
    quantize_main_kv: bool = False
    quantize_index: bool = False
    quantize_window: bool = False
    candidate_pool: bool = True
    index_teacher: Literal["own", "served"] = "own"
    remat: Literal["none", "attention", "block"] = "none"


PACKED = Policy(quantize_main_kv=True, quantize_index=True, quantize_window=True)


def record(taps: Taps | None, name: str, value: Any) -> None:
    """Keeps an intermediate under its golden name when a caller asked for them."""
    if taps is not None:
        taps[name] = value


def product(equation: str, x: Array, weight: Array, out: Any = None) -> Array:
    """``einsum(equation, x, weight)`` with ``weight`` in ``x``'s dtype, summed in float32, in ``out`` (default ``x``'s dtype).

    float32 runs at full precision on every backend. Below it, gradients are products in that dtype too, whatever ``out`` is, and
    a weight's has the weight's own dtype: a float32 master is given float32 sums (training §1.2).
    """
    out = x.dtype if out is None else out
    if x.dtype == jnp.float32:
        return jnp.einsum(equation, x, weight.astype(x.dtype), precision=lax.Precision.HIGHEST, preferred_element_type=out)
    return _narrow(equation, jnp.dtype(out), x, weight)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _narrow(equation: str, out: Any, x: Array, weight: Array) -> Array:
    return jnp.einsum(equation, x, weight.astype(x.dtype), preferred_element_type=out)


def _narrow_forward(equation: str, out: Any, x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return _narrow(equation, out, x, weight), (x, weight)


def _narrow_backward(equation: str, out: Any, kept: tuple[Array, Array], ct: Array) -> tuple[Array, Array]:
    (x, weight), [a, b, c] = kept, equation.replace("->", ",").split(",")
    ct = ct.astype(x.dtype)
    of_x = jnp.einsum(f"{c},{b}->{a}", ct, weight.astype(x.dtype))
    return of_x, jnp.einsum(f"{c},{a}->{b}", ct, x, preferred_element_type=weight.dtype)


_narrow.defvjp(_narrow_forward, _narrow_backward)


def linear(x: Float[Array, "*s i"], weight: Float[Array, "o i"], dtype: Any = None, out: Any = None) -> Float[Array, "*s o"]:
    """``x W^T`` with factors of ``dtype`` (default ``x``'s), as `product` has it."""
    x = x if dtype is None else x.astype(dtype)
    return product("ti,oi->to", x.reshape(-1, x.shape[-1]), weight, out).reshape(*x.shape[:-1], weight.shape[0])


def rms_norm(x: Float[Array, "*s d"], weight: Float[Array, " d"], eps: float) -> Float[Array, "*s d"]:
    """Statistics and gain in float32, then ``x``'s dtype (§3)."""
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + jnp.float32(eps))
    return (x32 * scale * weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def swiglu(gate: Float[Array, "*s f"], up: Float[Array, "*s f"], limit: float) -> Float[Array, "*s f"]:
    """silu(min(gate, limit)) * clip(up, -limit, limit) in float32 (§9)."""
    gate = jnp.minimum(gate.astype(jnp.float32), limit)
    return jax.nn.silu(gate) * jnp.clip(up.astype(jnp.float32), -limit, limit)


def sink_softmax(scores: Float[Array, "*s H S"], mask: Bool[Array, "*s 1 S"], sink: Float[Array, " H"]) -> Float[Array, "*s H S"]:
    """Softmax over the masked-in scores with ``exp(sink)`` in the denominator only (§4.5).

    A row with nothing masked in is all zeros, with finite gradients: masking comes before the exponential.
    """
    sink = sink.astype(jnp.float32).reshape((1,) * (scores.ndim - 2) + (-1, 1))
    safe = jnp.where(mask, scores, -1e30)
    top = lax.stop_gradient(jnp.maximum(jnp.max(safe, axis=-1, keepdims=True), jnp.maximum(sink, -1e30)))
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, safe - top, 0.0)), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - top)
    # With a sink of -inf and no key the total is 0.
    return weights / jnp.where(total > 0, total, 1.0)
