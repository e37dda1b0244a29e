"""Running a kernel without its device: the parameters of the interpreters, in one place."""

from typing import Any

import jax


def gpu_interpreter() -> Any:
    """Pallas' interpreter of Mosaic GPU kernels on CPU, which also looks for races between threads; None, the kernel itself,
    where there is a GPU."""
    if jax.default_backend() == "gpu":
        return None
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams(detect_races=True)


def gpu_races() -> bool:
    """Whether the interpreter has seen a race in the kernel that it ran last; those of earlier ones are forgotten."""
    if jax.default_backend() == "gpu":
        return False
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    state = interpret_pallas_call.get_races()
    return bool(state.races_found)


def tpu_interpreter() -> Any:
    """Pallas' interpreter of Mosaic TPU kernels on CPU, which also looks for races between copies and arithmetic."""
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.InterpretParams(detect_races=True)


def tpu_races() -> bool:
    """Whether the interpreter has seen a race in the last kernel that it ran."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    state = interpret_pallas_call.races
    return bool(state and state.races_found)
