"""Which implementation of an op runs, and why.

An op is a folder of this package: ``api.py`` its public function, ``reference.py`` the plain form, ``gpu.py`` and ``tpu.py``
the kernels, ``cases.py`` the shapes that tests and benchmarks share. Every implementation module has ``run``, of one
signature; a kernel also has ``refusal``, of the same signature, which reads shapes and dtypes only and gives the reason
why the kernel cannot take them, or None.
"""

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, Literal

import jax

Impl = Literal["auto", "reference", "gpu", "tpu"]
OPS = ("engram_gather", "grouped_matmul", "index_topk", "mega_mhc", "quantize", "sparse_attention")
_KERNELS = ("gpu", "tpu")  # each for the backend of its name
_log = logging.getLogger(__name__)
_automatic: ContextVar[Impl] = ContextVar("automatic", default="auto")


class Refused(ValueError):
    """A named implementation cannot run here, or not on these arguments."""


@dataclass(frozen=True)
class Choice:
    """The implementation that runs, and why each one ahead of it in the order does not."""

    op: str
    impl: str
    refusals: dict[str, str]


def module(op: str, name: str) -> ModuleType:
    """``name`` of an op's folder; kernels are imported only where they are asked for."""
    return importlib.import_module(f"kernels_pallas.{op}.{name}")


def _refusal(op: str, impl: str, backend: str, args: tuple, kwargs: dict[str, Any]) -> str | None:
    if impl == "reference":
        return None
    if backend != impl:
        return f"the backend is {backend}"
    try:
        kernel = module(op, impl)
    except ModuleNotFoundError:
        return "not written"
    except ImportError as error:
        return f"cannot be imported: {error}"
    return kernel.refusal(*args, **kwargs)


@cache
def _say_once(op: str, impl: str, reason: str) -> None:
    _log.warning("%s runs its reference, not its %s kernel: %s", op, impl, reason)


@contextmanager
def automatic(impl: Impl) -> Iterator[None]:
    """What `auto` means for calls traced inside: a comparison runs the model once with "reference" and once without."""
    before = _automatic.set(impl)
    try:
        yield
    finally:
        _automatic.reset(before)


def choose(op: str, impl: Impl, *args: Any, backend: str | None = None, **kwargs: Any) -> Choice:
    """What ``impl`` means for these arguments (arrays or their shapes). `Refused` when a named one cannot run."""
    backend = jax.default_backend() if backend is None else backend
    backend = {"cuda": "gpu"}.get(backend, backend)
    impl = _automatic.get() if impl == "auto" else impl
    if impl != "auto":
        reason = _refusal(op, impl, backend, args, kwargs)
        if reason is not None:
            raise Refused(f"{op}: impl: found {impl!r}, which cannot run: {reason}")
        return Choice(op, impl, {})
    refusals: dict[str, str] = {}
    for name in _KERNELS:
        reason = _refusal(op, name, backend, args, kwargs)
        if reason is None:
            return Choice(op, name, refusals)
        refusals[name] = reason
    return Choice(op, "reference", refusals)


@cache
def _program(op: str, impl: str, options: tuple[str, ...]) -> Any:
    """Jitted, so that of a program's many calls of one shape only the first is traced and lowered."""
    return jax.jit(module(op, impl).run, static_argnames=options)


def call(op: str, impl: Impl, *args: Any, **kwargs: Any) -> Any:
    """Runs the chosen implementation; where `auto` falls back on an accelerator it says so once."""
    choice = choose(op, impl, *args, **kwargs)
    own = jax.default_backend()
    if choice.impl == "reference" and impl == "auto" and own in choice.refusals:
        _say_once(op, own, choice.refusals[own])
    return _program(op, choice.impl, tuple(kwargs))(*args, **kwargs)
