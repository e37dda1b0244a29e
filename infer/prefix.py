"""What requests that begin alike have in common: found, loaded, kept (serving §3, §4).

A prefix comes as blocks of entries and keys, checked against their digests; or with a snapshot of the windows behind it. Of the
first kind the last tokens run again through the encoder (`dsv41.prefill.replay_start`); a hit that would save less than a block
is none.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from dsv41.cache import Cache
from dsv41.config import ModelConfig
from dsv41.errors import UserError
from dsv41.numerics import Policy
from dsv41.prefill import decoder_layers, replay_start
from dsv41.restore import Blocks, history_at, put_blocks, take_blocks
from infer.model import Model, model_digest
from infer.payload import BlockFormat
from infer.steps import DecoderReplay
from infer.store import BlockStore
from infer.windows import WindowPool

_PIECE = 16  # blocks that are moved at once
_NOWHERE = 1 << 30
_PENDING = 64  # writes that may wait; more are dropped


@dataclass(frozen=True)
class Hit:
    """Where a prompt goes on: its first ``kept`` tokens have their entries, and the first to run is ``start``.

    floor: the first position that windows may reach. windows: the snapshot behind ``kept`` tokens, None where there is none.
    """

    kept: int = 0
    start: int = 0
    floor: int = 0
    windows: Any = None


NO_HIT = Hit()


class BlockMover:
    """Moves blocks between a cache and the host, a fixed number at once, so that two programs do it.

    rows: how a mesh cuts the cache, None for one device.
    """

    def __init__(self, config: ModelConfig, tokens: int, rows: NamedSharding | None = None):
        self._take = jax.jit(partial(take_blocks, tokens=tokens, config=config))
        put = partial(put_blocks, tokens=tokens, config=config)
        self._put = jax.jit(put, donate_argnums=0, out_shardings=rows)

    def take(self, cache: Cache, places: Sequence[int]) -> list[Blocks]:
        """The blocks at these places, each ``[n // r, row]`` (`dsv41.restore.take_blocks`)."""
        found: list[Blocks] = []
        for at in range(0, len(places), _PIECE):
            part = [*places[at : at + _PIECE]]
            blocks = jax.device_get(self._take(cache, np.asarray(part + [0] * (_PIECE - len(part)), np.int32)))
            found += [jax.tree.map(lambda a, n=n: a[n], blocks) for n in range(len(part))]
        return found

    def put(self, cache: Cache, places: Sequence[int], blocks: Sequence[Blocks]) -> Cache:
        """The cache, which is donated, with blocks at these places."""
        for at in range(0, len(places), _PIECE):
            part, values = [*places[at : at + _PIECE]], [*blocks[at : at + _PIECE]]
            values += [values[0]] * (_PIECE - len(values))
            stacked = jax.tree.map(lambda *rows: np.stack(rows), *values)
            cache = self._put(cache, np.asarray(part + [_NOWHERE] * (_PIECE - len(part)), np.int32), stacked)
        return cache


class PrefixCache:
    """Blocks of one model under one policy in a store, and snapshots of windows, both optional.

    Reading checks each block, and counts and removes one that is damaged. Writing happens in a thread of its own; where it
    cannot follow, rows are dropped. block: tokens of each, the window's where not given. `UserError` for a model without a
    decoder half, or an impossible block.
    """

    def __init__(
        self,
        model: Model,
        policy: Policy,
        decoder_replay: DecoderReplay,
        block: int | None = None,
        store: BlockStore | None = None,
        windows: WindowPool | None = None,
    ):
        self.config, self.fold = model.config, model.token_map
        if not decoder_layers(self.config):
            raise UserError("prefix_cache: found a model without a decoder half, allowed is one with encoder and decoder layers")
        self.block, self.store, self.windows = block or self.config.sliding_window, store, windows
        self.exact = decoder_replay != "bounded"
        self.format = BlockFormat(self.config, policy, self.block, model_digest(model), self.exact)
        self.mover = BlockMover(self.config, self.block, model.rows)
        # Decoder windows differ with the replay; the blocks are the encoder's alone.
        self._windows_of = decoder_replay.encode()
        self._writer, self._reader = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._waiting = 0
        self._count = threading.Lock()

    def keys(self, ids: Sequence[int]) -> list[bytes]:
        """See `BlockFormat.keys`."""
        return self.format.keys(ids)

    def _parent(self, keys: Sequence[bytes], n: int) -> bytes:
        return keys[n - 1] if n else self.format.namespace

    def _tokens(self, ids: Sequence[int], n: int) -> Sequence[int]:
        return ids[n * self.block : (n + 1) * self.block]

    def load(self, keys: Sequence[bytes], ids: Sequence[int], first: int = 0) -> list[Blocks]:
        """Blocks of a request from number ``first`` on, up to the first that is missing or damaged."""
        if self.store is None or first >= len(keys):
            return []
        found: list[Blocks] = []
        for n, payload in enumerate(self.store.get_run(keys[first:]), first):
            rows = self.format.unpack(payload, keys[n], self._parent(keys, n), self._tokens(ids, n))
            if rows is None:
                self.store.damaged(keys[n])
                break
            found.append(rows)
        if found:
            self._behind(self.store.touch, keys[: first + len(found)])
        return found

    def load_behind(self, keys: Sequence[bytes], ids: Sequence[int], first: int) -> Future[list[Blocks]] | None:
        """`load` in a thread of its own; None where there is nothing to look for."""
        if self.store is None or not self.store.on or first >= len(keys):
            return None
        return self._reader.submit(self.load, [*keys], [*ids], first)

    def save(self, keys: Sequence[bytes], ids: Sequence[int], first: int, blocks: Sequence[Blocks]) -> None:
        """Writes blocks from number ``first`` on, behind; those that are there stay as they are."""
        if self.store is not None and blocks:
            self._behind(self._write, self.store, [*keys], [*ids], first, [*blocks])

    def _write(self, store: BlockStore, keys: list[bytes], ids: list[int], first: int, blocks: list[Blocks]) -> None:
        new = {*store.missing(keys[first : first + len(blocks)])}
        store.put(row for row in self.rows(keys, ids, first, blocks) if row[0] in new)

    def rows(
        self, keys: Sequence[bytes], ids: Sequence[int], first: int, blocks: Sequence[Blocks]
    ) -> list[tuple[bytes, int, bytes]]:
        """Blocks from number ``first`` on as `BlockStore.put` takes them."""
        pack = self.format.pack
        return [
            (keys[n], n, pack(keys[n], self._parent(keys, n), self._tokens(ids, n), block))
            for n, block in enumerate(blocks, first)
        ]

    def _behind(self, call: Any, *args: Any) -> None:
        with self._count:
            if self._waiting >= _PENDING:
                if self.store is not None:
                    self.store.counts["dropped"] += 1
                return
            self._waiting += 1
        self._writer.submit(call, *args).add_done_callback(self._done)

    def _done(self, future: Future) -> None:
        with self._count:
            self._waiting -= 1

    def flush(self) -> None:
        """Returns when everything is written."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Writes what waits and closes the store."""
        self._reader.shutdown()
        self._writer.shutdown()
        if self.store is not None:
            self.store.close()

    def drop(self, keys: Sequence[bytes], windows: Any = None) -> None:
        """Removes blocks and a snapshot behind which a prefill failed, so that they are not tried again."""
        if self.store is not None:
            self.store.delete(keys)
        if self.windows is not None:
            self.windows.drop(windows)

    def keep_windows(self, ids: Sequence[int], state: Any) -> None:
        """Keeps the snapshot of a request behind the tokens ``ids``."""
        if self.windows is not None:
            keys = [self.format.namespace, *self.keys(ids)]
            self.windows.put(self._name(keys[-1]), ids[(len(keys) - 1) * self.block :], state)

    def _name(self, key: bytes) -> bytes:
        return key + self._windows_of

    def hit(self, keys: Sequence[bytes], ids: Sequence[int], blocks: int, snapshots: bool = True) -> Hit:
        """Where a prompt goes on of whose blocks so many are at hand: the place that leaves least to run, or its beginning.

        snapshots: whether who asks can go on from one.
        """
        end, kept = len(ids), blocks * self.block
        start = replay_start(self.config, end, kept, self.exact)
        best = Hit(kept, start, start)
        if self.windows is not None and snapshots:
            names = [self._name(key) for key in (self.format.namespace, *keys[:blocks])]
            found = self.windows.find(names, ids, self.block)
            # The last token runs again for its logits; its row in the ring is not one that it reads.
            if found is not None and min(found[0], end - 1) >= start:
                best = Hit(found[0], min(found[0], end - 1), 0, found[1])
        return best if best.start >= self.block else NO_HIT

    def history(self, ids: Sequence[int], hit: Hit) -> np.ndarray:
        """See `dsv41.restore.history_at`."""
        return history_at(ids, hit.start, self.fold, self.config)


def lengths(hits: Sequence[Hit], name: str, batch: int) -> jax.Array:
    """A field of hits as int32 ``[batch]``, zeros behind them."""
    values = np.zeros(batch, np.int32)
    values[: len(hits)] = [getattr(hit, name) for hit in hits]
    return jnp.asarray(values)
