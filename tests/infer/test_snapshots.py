"""Snapshots of requests: what goes on from one is what went on without."""

from functools import partial

import numpy as np
import pytest

from bench.soak import Told
from infer.engine import Engine
from infer.prefix import PrefixCache
from infer.requests import Request
from infer.sampling import Sampling
from infer.windows import WindowPool
from tests.infer.test_engine import FOUR_LAYERS
from tests.models import PLAIN, tiny_model

IDS = np.random.default_rng(9).integers(3, 280, 48).tolist()
PAGE = 12  # a multiple of every ratio here
build = partial(Engine, policy=PLAIN, slots=2, longest=96, page=PAGE, pages=26, chunks=(16,), block=5, decoder_replay="halo")


def run(engine, ids, count=8):
    """Tokens, their log-probabilities, and how many of the prompt's were found."""
    told = Told()
    engine.submit(Request(ids, Sampling(max_new_tokens=count)), told.hear)
    while engine.step():
        pass
    assert told.last is not None and told.last.finish in ("length", "stop"), told.last
    assert told.last.usage is not None
    return told.ids, told.logprobs, told.last.usage.cached_tokens


@pytest.mark.parametrize("ratio", [3, 4])
def test_a_prompt_asked_again_goes_on_from_within_its_last_group(ratio):
    model = tiny_model(**{**FOUR_LAYERS, "compress_ratios": (0, ratio, 1, 1)})
    engine = build(model, prefix=PrefixCache(model, PLAIN, "halo", PAGE, windows=WindowPool(1 << 24)))
    for size in range(36, 37 + ratio):
        ids, logprobs, cached = run(engine, IDS[:size])
        assert cached < size
        # To the bit: the same programs on the same rows.
        assert run(engine, IDS[:size]) == (ids, logprobs, size)
