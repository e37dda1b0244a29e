"""What Mosaic GPU asks for differently in the versions of jax that this project runs on."""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu


def store(ref: Any, value: Any) -> None:
    """Writes registers as they lie; jax 0.12 refuses by default what is not the widest transfer to its place."""
    own = getattr(plgpu, "store", None)
    if own is None:
        ref[...] = value
    else:
        own(ref, value, optimized=False)
