"""The entries that queries attend to: scores against stored index keys, exact top-k, the candidate pool (architecture §7)."""

from jaxtyping import Array, Float, Int

from kernels_pallas import registry
from kernels_pallas.registry import Impl


def index_topk(
    q: Float[Array, "B T H KI"],
    weights: Float[Array, "B T H"],
    keys: Array,
    first: Int[Array, "B T"],
    count: Int[Array, "B T"],
    table: Int[Array, "B G"] | None = None,
    pool: Int[Array, "B T n"] | None = None,
    *,
    k: int,
    keep: int = 0,
    block: int = 8,
    impl: Impl = "auto",
) -> tuple[Int[Array, "B T k"], Int[Array, "B T keep"] | None]:
    """Ids of the ``min(k, S)`` entries with the best ``sum_h w_h relu(q_h . key_s)``, ascending, -1 behind them.

    q, weights: of one layer's indexer, after RoPE and quantisation, the weights with their scale. keys: pages of stored rows
    ``[P, page, row]`` uint8 (`dsv41.quant.INDEX_KEY`), or of values ``[P, page, KI]``; table: page of each ``page`` entries of a
    request, -1 past its last; None where page b is all of request b. A query sees entries first .. first + count - 1; the
    lowest of equal scores wins. pool: numbers of the blocks of ``block`` entries that a query is restricted to, ascending, -1
    behind them: then no other entry is read.

    keep: how many blocks to return for queries that are to be restricted to them: those with the best entry among those
    visible, and in any case the one of the newest, ``[B, T, min(keep, blocks)]``, ascending, -1 behind them; None for 0.
    """
    args = (q, weights, keys, first, count, table, pool)
    return registry.call("index_topk", impl, *args, k=k, keep=keep, block=block)
