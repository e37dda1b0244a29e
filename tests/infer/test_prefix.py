"""Prompts that begin alike: found in a file, by others too, continued as without it; what must not be found is not."""

import sqlite3

import jax
import numpy as np
import pytest

from dsv41 import cli
from dsv41.config import replace
from dsv41.errors import UserError
from infer.generate import Generator
from infer.model import Model, model_digest
from infer.prefix import PrefixCache
from infer.sampling import Sampling
from infer.store import BlockStore
from tests.models import PLAIN, tiny_model

MODEL = tiny_model()
BLOCK = 8
PROGRAMS: dict = {}
RNG = np.random.default_rng(5)
SHARED = RNG.integers(3, 280, 70).tolist()
PROMPTS = [SHARED[:n] + RNG.integers(3, 280, more).tolist() for n, more in ((70, 0), (66, 9), (64, 0), (14, 10))]
RULES = [Sampling(max_new_tokens=20), *[Sampling(max_new_tokens=6, seed=n, temperature=0.7 * (n % 2)) for n in range(3)]]


@pytest.fixture(autouse=True)
def _one_width(monkeypatch):
    monkeypatch.setattr("infer.generate.CHUNKS", (32,))


@pytest.fixture
def make(tmp_path):
    """Makes generators of one store's file, whose programs are shared."""
    made = []

    def build(model=MODEL, file="a.db"):
        prefix = PrefixCache(model, PLAIN, "full", BLOCK, BlockStore(tmp_path / file)) if file else None
        generator = Generator(model, PLAIN, "full", prefix)
        generator.programs = PROGRAMS
        made.append(generator)
        return generator

    yield build
    for generator in made:
        if generator.prefix:
            generator.prefix.close()


def same(found, want, exact=True):
    assert [one.ids for one in found] == [one.ids for one in want]
    for a, b in zip(found, want, strict=True):
        # fp32 sums in another order on log-probabilities of order 10.
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-4 if exact else 0)


@pytest.fixture(scope="module")
def want():
    """Of runs without a prefix cache."""
    generator = Generator(MODEL, PLAIN)
    generator.programs = PROGRAMS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infer.generate.CHUNKS", (32,))
        return generator.generate(PROMPTS, RULES)[0]


@pytest.mark.pitfall("C3", "C8", "C9", "O1")
def test_a_found_prefix_gives_the_tokens_of_a_cold_run(make, want):
    first = make()
    same(first.generate(PROMPTS, RULES)[0], want, exact=False)
    first.prefix.close()
    other = make()
    found, speed = other.generate(PROMPTS, RULES)
    same(found, want)
    # Of 70, of 75, all of 64; the last one's three blocks would save nothing.
    assert [one.cached_tokens for one in found] == [64, 72, 64, 0]
    assert speed.cached_tokens == 200 and speed.prompt_tokens < sum(map(len, PROMPTS)) - 100
    # What it said has blocks too, and so has what came behind a found prefix.
    longer = [PROMPTS[0] + want[0].ids + [9, 9], PROMPTS[1] + want[1].ids, *PROMPTS[2:]]
    cold = make(file=None).generate(longer, RULES)[0]
    other.prefix.flush()
    found = other.generate(longer, RULES)[0]
    same(found, cold)
    assert [one.cached_tokens for one in found] == [88, 80, 64, 0]
    other.prefix.flush()
    assert [one.cached_tokens for one in other.generate(longer, RULES)[0]] == [88, 80, 64, 0]


def test_whatever_befalls_the_file_the_tokens_are_those_of_a_cold_run(make, want, tmp_path):
    first = make()
    first.generate(PROMPTS, RULES)
    first.prefix.close()
    base, keys = sqlite3.connect(tmp_path / "a.db"), first.prefix.keys(PROMPTS[1])
    base.execute("UPDATE blocks SET payload = zeroblob(length(payload)) WHERE key = ?", (keys[5],))
    base.commit()
    base.close()
    damaged = make()
    for tokens, corrupt in (([40, 40, 40, 0], 1), ([64, 72, 64, 0], 1)):
        found = damaged.generate(PROMPTS, RULES)[0]
        same(found, want)
        assert [one.cached_tokens for one in found] == tokens and damaged.prefix.store.counts["corrupt"] == corrupt
        damaged.prefix.flush()
    damaged.prefix.close()
    (tmp_path / "a.db").write_bytes(RNG.bytes(50_000))
    begun = make()
    same(begun.generate(PROMPTS, RULES)[0], want, exact=False)
    assert begun.prefix.store.counts["put_aside"] == 1


def test_other_weights_and_other_maps_find_nothing(make):
    first = make()
    first.generate(PROMPTS, RULES)
    first.prefix.flush()
    params = jax.tree.map(lambda a: a, MODEL.params)
    params = replace(params, embed=params.embed.at[5, 0].add(1e-3))
    swapped = np.array(MODEL.token_map)
    swapped[[5, 6]] = swapped[[6, 5]] + 1
    others = [
        Model(params, MODEL.config, MODEL.tokenizer, MODEL.token_map, 0),
        Model(MODEL.params, MODEL.config, MODEL.tokenizer, swapped, 0),
        Model(MODEL.params, MODEL.config, MODEL.tokenizer, MODEL.token_map, 0, b"another checkpoint"),
    ]
    assert len({model_digest(model) for model in (MODEL, *others)}) == 4
    for model in others:
        prefix = make(model=model).prefix
        assert prefix.load(prefix.keys(PROMPTS[0]), PROMPTS[0]) == []
    prefix = make().prefix
    assert len(prefix.load(prefix.keys(PROMPTS[0]), PROMPTS[0])) == 8


def test_a_prompt_that_is_refused_leaves_no_file(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("infer.model.load_model", lambda run, mesh: MODEL)
    words = ["--checkpoint", str(tmp_path), "--prompt", "a", "--prefix-cache", str(tmp_path / "a.db")]
    for more in (["--json"], []):
        assert cli.run(["generate", *words, "--max-new-tokens", "100000", *more]) == 2
        out, err = capsys.readouterr()
        assert out == "" and "tokens and" in err and not list(tmp_path.iterdir())


def test_what_cannot_have_a_prefix_cache():
    with pytest.raises(UserError, match="block: found 3, allowed is a positive multiple of 2"):
        PrefixCache(MODEL, PLAIN, "full", 3)
    none = {"kv_source_layer_ids": (), "index_source_layer_ids": (), "compress_ratios": (0,) * 6}
    v4 = replace(MODEL.config, **none, candidate_source_layer_id=-1)
    with pytest.raises(UserError, match="without a decoder half"):
        PrefixCache(Model(MODEL.params, v4, MODEL.tokenizer, MODEL.token_map, 0), PLAIN, "full", 8)
