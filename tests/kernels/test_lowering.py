"""Shapes of the tests lower for CUDA wherever the GPU kernel takes them: the interpreter does not know what TMA refuses."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import registry

_DIFFERENTIABLE = ("grouped_matmul",)


def _cases():
    for op in registry.OPS:
        module = registry.module(op, "cases")
        for name, case in module.SMALL.items():
            args, options = module.abstract(case), module.options(case)
            if registry.choose(op, "auto", *args, backend="gpu", **options).impl == "gpu":
                yield pytest.param(op, args, options, id=f"{op}, {name}")


@pytest.mark.parametrize(("op", "args", "options"), [*_cases()])
def test_small_shapes_lower_for_cuda(op, args, options):
    run = partial(registry.module(op, "gpu").run, **options)
    assert "mosaic_gpu" in jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def _trained():
    for param in _cases():
        op, args, _ = param.values
        if op in _DIFFERENTIABLE and all(hasattr(w, "dtype") for w in args[1]):
            yield param


@pytest.mark.parametrize(("op", "args", "options"), [*_trained()])
def test_their_gradients_lower_for_cuda(op, args, options):
    def pulled(x, weights, *rest):
        run = lambda x, w: jnp.sum(registry.module(op, "gpu").run(x, w, *rest, **options).astype(jnp.float32))  # noqa: E731
        return jax.grad(run, argnums=(0, 1))(x, weights)

    assert "mosaic_gpu" in jax.jit(pulled).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
