"""The programs of `infer.generate` lowered for a mesh: a chunk of a prompt, and a block of decode steps."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE

from dsv41.cache import cache_bytes, init_cache
from dsv41.config import ModelConfig
from dsv41.errors import UserError
from dsv41.numerics import Policy
from dsv41.params import map_specs, text_specs
from dsv41.sharding import Sizes, mesh_sizes, padded_shape, row_parts, shard_bytes
from infer.generate import on_mesh
from infer.model import Model, check_decoding_mesh
from infer.sampling import SamplingRows
from infer.steps import CHUNKS, Steps

PACKED = Policy(jnp.bfloat16, True, True, True)


def trace_infer(config: ModelConfig, mesh: Any, kind: str, rows: int, length: int) -> tuple[Any, dict[str, int]]:
    """A program traced for ``rows`` rows on each device along the rows' axes, and one device's bytes of weights and cache.

    kind: "prefill", the widest chunk into a cache of ``length`` tokens a row, or "decode", a block of steps behind it. bfloat16
    passes, packed cache. Raises `UserError` for a mesh or length that cannot be.
    """
    sizes: Sizes = mesh_sizes(mesh)
    check_decoding_mesh(sizes, config)
    batch = rows * row_parts(sizes)
    try:
        cache = jax.eval_shape(partial(init_cache, config, PACKED, batch, length))
    except UserError as error:
        raise UserError(f"length: {str(error).partition(': ')[2]}") from None
    specs = text_specs(config)
    weights = map_specs(lambda spec: jax.ShapeDtypeStruct(padded_shape(spec, sizes), spec.dtype), specs)
    fold = np.arange(config.vocab_size, dtype=np.int32) % config.engram_compressed_vocab_size
    steps = Steps(Model(None, config, Tokenizer(BPE()), fold, 0), PACKED, "full")
    of = lambda dtype, *shape: jax.ShapeDtypeStruct((batch, *shape), dtype)  # noqa: E731
    if kind == "prefill":
        width = min(CHUNKS[-1], length)
        function: Any = partial(steps.fill, early=False)
        args = (of(jnp.int32, width), of(jnp.bool, width), of(jnp.int32))
    else:
        drawn = SamplingRows(of(jnp.float32), of(jnp.int32), of(jnp.float32), of(jnp.float32), of(jnp.uint32))
        args, function = (of(jnp.int32), of(jnp.int32), of(jnp.int32, 4), drawn), steps.decode
    traced = jax.jit(on_mesh(function, kind, config, mesh), donate_argnums=1).trace(weights, cache, *args)
    return traced, {
        "tokens": batch * (args[0].shape[1] if kind == "prefill" else 1),
        "weight_bytes": shard_bytes(specs, sizes, stored=()),
        "cache_bytes": cache_bytes(cache) // row_parts(sizes),
    }
