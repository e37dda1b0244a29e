"""The cache of requests that come and go: sources as pools of pages, the rest one a slot (serving §1.5).

`bind` makes of it the cache that the model's functions take, with the pages of the requests at hand; `unbind` takes the table
away again, so that what is donated from step to step is in the tree once.
"""

from dataclasses import replace

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from dsv41.cache import Cache, SourceCache, init_cache
from dsv41.config import ModelConfig
from dsv41.numerics import Policy
from dsv41.pages import Pages


def init_pool(config: ModelConfig, policy: Policy, slots: int, pages: int, page: int) -> Cache:
    """An empty cache of ``slots`` requests whose sources hold pools of pages, for `bind`; raises as `init_cache` does.

    pages: with page 0, which is nobody's. page: tokens of each. To be jitted, as it makes arrays that it drops.
    """
    one, pool = init_cache(config, policy, slots, page), init_cache(config, policy, pages, page)
    sources = zip(one.sources, pool.sources, strict=True)
    return replace(one, sources=tuple(replace(s, main_kv=p.main_kv, index_k=p.index_k) for s, p in sources))


def bind(cache: Cache, table: Int[Array, "B m"]) -> Cache:
    """A cache of pools as one of the requests with these pages."""
    bound = lambda s: replace(s, main_kv=Pages(s.main_kv, table), index_k=Pages(s.index_k, table))  # noqa: E731
    return replace(cache, sources=tuple(map(bound, cache.sources)))


def unbind(cache: Cache) -> Cache:
    """The cache of pools, without the table that `bind` gave it."""
    pools = lambda s: replace(s, main_kv=s.main_kv.pool, index_k=s.index_k.pool)  # noqa: E731
    return replace(cache, sources=tuple(map(pools, cache.sources)))


def slot_of(cache: Cache, slot: Int[Array, ""], fresh: Bool[Array, ""]) -> Cache:
    """The one request in a slot of a cache of pools, which stay whole; as good as empty where ``fresh``."""
    own = lambda a: lax.dynamic_slice_in_dim(a, slot, 1)  # noqa: E731
    length, history = own(cache.length), own(cache.history)
    return Cache(
        jnp.where(fresh, 0, length),
        jnp.where(fresh, -1, history),
        tuple(map(own, cache.windows)),
        tuple(replace(s, **{name: own(tail) for name, tail in tails(s).items()}) for s in cache.sources),
        tuple(map(own, cache.drafts)),
    )


def with_slot(cache: Cache, slot: Int[Array, ""], one: Cache) -> Cache:
    """The cache of pools with what became of the request of `slot_of`."""
    put_one = lambda a, b: lax.dynamic_update_slice_in_dim(a, b, slot, 0)  # noqa: E731
    sources = (
        replace(new, **{name: put_one(tail, getattr(new, name)) for name, tail in tails(old).items()})
        for old, new in zip(cache.sources, one.sources, strict=True)
    )
    return Cache(
        put_one(cache.length, one.length),
        put_one(cache.history, one.history),
        tuple(map(put_one, cache.windows, one.windows)),
        tuple(sources),
        tuple(map(put_one, cache.drafts, one.drafts)),
    )


def tails(source: SourceCache) -> dict[str, Array]:
    """The pair tails of a source, by name; none at ratio 1."""
    both = {"tail_value": source.tail_value, "tail_score": source.tail_score}
    return {name: tail for name, tail in both.items() if tail is not None}
