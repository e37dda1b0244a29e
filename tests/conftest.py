"""What every test runs under, and ``--pitfalls``: eight CPU devices, strict promotion, run-time checked annotations."""

import functools
import os
import re
import sys
from collections import defaultdict
from pathlib import Path

import hypothesis
import jaxtyping
import pytest

assert "jax" not in sys.modules, "jax reads these variables when it is imported"
ROOT = Path(__file__).parents[1]
# By environment, so that processes which tests start have the same devices and share the compilation cache.
# Compiling takes most of the time: LLVM's optimiser half of that, and in most small programs the emitters of fusions half
# of what is left (10 ms a program in place of 25). Code in parts, compiled side by side, costs a tenth more, and the two
# workers have no core to spare. One test holds code compiled as users' is to the golden numbers.
for flag in (
    "xla_force_host_platform_device_count=8",
    "xla_backend_optimization_level=0",
    "xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    "xla_cpu_parallel_codegen_split_count=1",
):
    if flag.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{flag}".lstrip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

import jax  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def _leave_inner_functions_unchecked() -> None:
    """Checks a module's functions and classes alone: one inside a function would be decorated anew, 2 ms, at each call."""
    jaxtyped = jaxtyping.jaxtyped

    def outer(**options):
        decorate = jaxtyped(**options)
        return lambda made: made if "<locals>" in made.__qualname__ else decorate(made)

    jaxtyping.jaxtyped = outer


_leave_inner_functions_unchecked()
jaxtyping.config.update("jaxtyping_remove_typechecker_stack", True)
# pep484_tower: an int will do for a float, as it does for static checkers.
jaxtyping.install_import_hook(
    ["dsv41", "train", "infer", "kernels_pallas"],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)

# A run's first example compiles. Where CI is set, the same examples every time.
hypothesis.settings.register_profile("dsv41", deadline=None, derandomize="CI" in os.environ, report_multiple_bugs=False)
hypothesis.settings.load_profile("dsv41")


FIELDS = {
    "A": "compressor",
    "B": "indexer and pool",
    "C": "window",
    "D": "Engram",
    "E": "mHC",
    "F": "FP4 and FP8",
    "G": "rotary and attention",
    "H": "experts",
    "I": "drafting",
    "J": "text and stopping",
    "K": "weight files",
    "L": "JAX",
    "M": "compiling, devices",
    "N": "training",
    "O": "batches",
}


def _exempt_pytree_classes() -> None:
    """Leaves the fields of pytree dataclasses unchecked: JAX rebuilds them around tracers, shardings and None."""
    register = jax.tree_util.register_dataclass

    @functools.wraps(register)
    def register_unchecked(nodetype, *args, **kwargs):
        nodetype.__no_type_check__ = True
        return register(nodetype, *args, **kwargs)

    jax.tree_util.register_dataclass = register_unchecked


_exempt_pytree_classes()


@pytest.fixture(scope="module", autouse=True)
def _clear_caches():
    """Frees a module's compiled functions, which otherwise add up over the whole run."""
    yield
    jax.clear_caches()


def pytest_addoption(parser):
    parser.addoption("--pitfalls", action="store_true", help="list which tests cover which kind of defect; run none")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    if not session.config.getoption("pitfalls") or session.testsfailed:
        return None
    tests = defaultdict(set)
    for item in session.items:
        for mark in item.iter_markers("pitfall"):
            for name in mark.args:
                assert name[0] in FIELDS, f"{item.nodeid}: no field {name[0]}"
                tests[name].add(item.nodeid.split("[")[0])
    write = session.config.get_terminal_writer().line
    write()
    write("a letter is a field: " + ", ".join(f"{letter} {field}" for letter, field in FIELDS.items()))
    for name in sorted(tests, key=_natural_order):
        for n, test in enumerate(sorted(tests[name])):
            write(f"{'' if n else name:6} {test}")
    repeated = ", ".join(f"{name} ({len(tests[name])})" for name in sorted(tests, key=_natural_order) if len(tests[name]) > 1)
    write(f"pitfalls covered: {len(tests)}; by more than one test: {repeated or 'none'}")
    return True


def _natural_order(name: str) -> list[tuple[bool, int, str]]:
    """A sort key that puts B2 before B10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.findall(r"\d+|\D+", name)]
