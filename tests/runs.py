"""What tests of runs share: a small text, a preset of the test's own, and the logged numbers that a resume repeats."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsv41.config import PRESETS, ModelConfig
from train.metrics import MEASURED

TEXT = "\n".join(f"def f{n}(a, b):\n    return a * {n} + b\n" for n in range(60))


@contextmanager
def small_data(base: Path, tiny: Callable[[], ModelConfig]) -> Iterator[pytest.MonkeyPatch]:
    """Three files in ``base/data``, a cache of their own, and preset ``tiny``, until the tests that use them end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSV41_CACHE", str(base / "cache"))
        (base / "data").mkdir()
        for name in "abc":
            (base / "data" / f"{name}.py").write_text(TEXT.replace("f", name))
        patch.setitem(PRESETS, "tiny", tiny)
        yield patch


def records(run: Path) -> list[dict]:
    """The run's metrics without what a clock measured."""
    found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in record.items() if k not in MEASURED} for record in found]
