"""What a block of tokens leaves behind, as bytes: named by all tokens up to its end, checked when read (serving §4.3, §4.5).

Of the release's rows a block of 128 tokens has 113,920 bytes, 890 a token; its tokens, a header and a digest add 0.6 %.
"""

import hashlib
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.cache import init_cache
from dsv41.config import ModelConfig, to_released
from dsv41.errors import UserError
from dsv41.numerics import Policy
from dsv41.plan import layer_plans
from dsv41.restore import Blocks

_MAGIC = b"dsv41kv\x01"
_HEADER = struct.Struct("<8s32s32s32sII")  # magic, namespace, key, parent, tokens, bytes of the rows
_DIGEST = 32


def digest(*parts: bytes) -> bytes:
    """SHA-256 of the parts, one after another."""
    return hashlib.sha256(b"".join(parts)).digest()


class BlockFormat:
    """Blocks of ``tokens`` of one model under one policy.

    model: a digest of its weights and token map. exact: how the rows behind a restored prefix are made (`replay_start`), so that
    who wants exact ones meets no others. `UserError` for tokens that are no positive multiple of every ratio.
    """

    def __init__(self, config: ModelConfig, policy: Policy, tokens: int, model: bytes = b"", exact: bool = False):
        ratios = [plan.ratio for plan in layer_plans(config) if plan.owns_kv]
        if tokens < 1 or tokens % math.lcm(*ratios):
            raise UserError(f"block: found {tokens}, allowed is a positive multiple of {math.lcm(*ratios)} tokens")
        self.tokens = tokens
        # As of a cache of one block: what a block holds is declared there.
        one = jax.eval_shape(partial(init_cache, config, policy, 1, tokens))
        self.sections = [(a.shape[1:], np.dtype(a.dtype)) for source in one.sources for a in (source.main_kv, source.index_k)]
        facts = {**asdict(policy), "compute_dtype": jnp.dtype(policy.compute_dtype).name, "tokens": tokens, "exact": exact}
        facts["sections"] = [[*shape, str(dtype)] for shape, dtype in self.sections]
        said = json.dumps([to_released(config), facts], sort_keys=True)
        self.namespace = digest(_MAGIC, said.encode(), model)
        self.row_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.sections)

    def keys(self, ids: Sequence[int]) -> list[bytes]:
        """The names of the complete blocks of a request: each the digest of the one before and its own tokens."""
        keys, key = [], self.namespace
        for at in range(0, len(ids) - self.tokens + 1, self.tokens):
            key = digest(key, self._ids(ids[at : at + self.tokens]))
            keys.append(key)
        return keys

    def _ids(self, ids: Sequence[int]) -> bytes:
        return np.asarray(ids, "<i4").tobytes()

    def pack(self, key: bytes, parent: bytes, ids: Sequence[int], rows: Blocks) -> bytes:
        """Bytes of one block, of rows ``[n // r, row]``; parent: the key of the block before, the namespace for the first."""
        body = b"".join(np.ascontiguousarray(a).tobytes() for pair in rows for a in pair)
        header = _HEADER.pack(_MAGIC, self.namespace, key, parent, self.tokens, len(body))
        payload = header + self._ids(ids) + body
        return payload + digest(payload)

    def unpack(self, payload: bytes, key: bytes, parent: bytes, ids: Sequence[int]) -> Blocks | None:
        """The rows of a block as `pack` took them; None where the bytes are not wholly those of this block of these tokens."""
        header = _HEADER.pack(_MAGIC, self.namespace, key, parent, self.tokens, self.row_bytes) + self._ids(ids)
        whole = len(header) + self.row_bytes
        if len(payload) != whole + _DIGEST or not payload.startswith(header) or digest(payload[:whole]) != payload[whole:]:
            return None
        arrays, at = [], len(header)
        for shape, dtype in self.sections:
            arrays.append(np.frombuffer(payload, dtype, math.prod(shape), at).reshape(shape))
            at += arrays[-1].nbytes
        return tuple(zip(arrays[::2], arrays[1::2], strict=True))
