"""How a kernel of flat tokens takes leading axes of any number, and gets its gradient."""

from collections.abc import Callable
from typing import Any

import jax

ROWS = 5  # y, streams, post, comb and pre, the arguments that have tokens


def differentiable(forward: Callable, pull: Callable, args: tuple) -> Any:
    """The outputs of ``forward(*args) -> (outputs, residuals)``, with the gradient ``pull(residuals, cotangents)``.

    Both see the arguments and outputs that have tokens with one axis of them.
    """
    lead = args[0].shape[:-1]
    flat = (a.reshape(-1, *a.shape[len(lead) :]) for a in args[:ROWS])
    call = jax.custom_vjp(lambda *args: forward(*args)[0])
    call.defvjp(forward, pull)
    return jax.tree.map(lambda a: a.reshape(*lead, *a.shape[1:]), call(*flat, *args[ROWS:]))
