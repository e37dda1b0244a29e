"""Generation through the cache: equal to the plain path, whatever the batch; what ends it; how often it compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.config import replace
from dsv41.errors import UserError
from dsv41.model import forward
from dsv41.numerics import PACKED
from infer.generate import Generator
from infer.model import Model
from infer.plain import PlainGenerator
from infer.sampling import Sampling
from tests.models import PLAIN, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def generator(model):
    return Generator(model)


def prompts(count, seed=0, longest=30):
    rng = np.random.default_rng(seed)
    return [[0, *rng.integers(3, 280, rng.integers(1, longest)).tolist()] for _ in range(count)]


@pytest.mark.pitfall("O1")
def test_twenty_prompts_give_the_tokens_of_the_plain_path(model, generator):
    asked, greedy = prompts(20), Sampling(max_new_tokens=10)
    plain = PlainGenerator(model, 64)
    want = [plain.continue_ids(ids, greedy) for ids in asked]
    found, speed = generator.generate(asked, [greedy] * 20)
    assert [one.ids for one in found] == want
    assert any(len(set(ids)) > 2 for ids in want)
    assert speed.prompt_tokens == sum(map(len, asked))
    assert speed.new_tokens == sum(map(len, want))
    drawn = Sampling(temperature=0.8, top_p=0.9, seed=5, max_new_tokens=10)
    found, _ = generator.generate(asked, [drawn] * 20)
    assert [one.ids for one in found[:5]] == [plain.continue_ids(ids, drawn) for ids in asked[:5]]


def test_a_halo_gives_the_tokens_of_all_rows(model, generator, monkeypatch):
    """Prompts of up to 90 tokens: of the first 64 of the longest, the encoder alone; then a decoder that runs 10 rows."""
    monkeypatch.setattr("infer.generate.CHUNKS", (16, 64))
    asked, greedy = [ids + ids[1:] * 3 for ids in prompts(6, seed=3, longest=24)], Sampling(max_new_tokens=8)
    asked[0] = (asked[0] * 90)[:90]
    other = Generator(model, decoder_replay="halo")
    together = [one.ids for one in other.generate(asked, [greedy] * 6)[0]]
    assert other.generate(asked[:1], [greedy])[0][0].ids == together[0]
    assert [one.ids for one in generator.generate(asked, [greedy] * 6)[0]] == together
    assert {kind for kind, *_ in other.programs} == {"encode", "prefill", "first", "decode"}


@pytest.mark.pitfall("O1", "O4", "O2")
def test_a_request_does_not_see_its_batch(generator):
    """Alone, and in batches of 2 and 8, in any slot, beside requests that end earlier or later; greedy and drawn."""
    asked = prompts(8, seed=1, longest=15)
    rules = [Sampling(temperature=0.9 if n % 2 else 0.0, seed=n, max_new_tokens=3 + 2 * n) for n in range(8)]
    alone = [generator.generate([ids], [rule])[0][0] for ids, rule in zip(asked, rules, strict=True)]
    for members in ([1, 0], [5, 2], [7, 6, 5, 4, 3, 2, 1, 0], [2, 0, 4, 6, 7, 5]):
        found, _ = generator.generate([asked[n] for n in members], [rules[n] for n in members])
        assert [one.ids for one in found] == [alone[n].ids for n in members]
        for one, n in zip(found, members, strict=True):
            np.testing.assert_allclose(one.logprobs, alone[n].logprobs, rtol=0, atol=2e-5)
    same = [Sampling(temperature=1.0, seed=3, max_new_tokens=12)] * 2
    pair = generator.generate([asked[0]] * 2, same)[0]
    assert pair[0].ids == pair[1].ids
    other = generator.generate([asked[0]], [Sampling(temperature=1.0, seed=4, max_new_tokens=12)])[0][0]
    assert other.ids != pair[0].ids


def test_logprobs_are_those_of_the_full_forward_pass(model, generator):
    ids = prompts(1, seed=2)[0]
    found = generator.generate([ids], [Sampling(max_new_tokens=6)])[0][0]
    row = jnp.asarray([[*ids, *found.ids]], jnp.int32)
    fold = jnp.asarray(model.token_map, jnp.int32)
    logits = jax.jit(lambda p, r: forward(p, model.config, PLAIN, r, None, fold).logits)(model.params, row)
    logprobs = jax.nn.log_softmax(logits[0])
    for n, token in enumerate(found.ids):
        # fp32 sums in another order on logits of order 10.
        assert abs(float(logprobs[len(ids) - 1 + n, token]) - found.logprobs[n]) < 1e-4


@pytest.mark.pitfall("J5")
def test_what_ends_a_request(model, generator):
    ids = prompts(1, seed=3)[0]
    run = lambda **rule: generator.generate([ids], [Sampling(**rule)])[0][0]  # noqa: E731
    free = run(max_new_tokens=12)
    assert (free.finish, len(free.ids)) == ("length", 12)
    assert run(max_new_tokens=0).ids == []
    assert run(max_new_tokens=1).ids == free.ids[:1]
    fourth = free.ids[3]
    first = free.ids.index(fourth)
    stopped = run(max_new_tokens=12, stop_ids=(fourth,))
    assert (stopped.ids, stopped.finish) == (free.ids[:first], "stop")
    assert stopped.text == model.tokenizer.decode(free.ids[:first])
    other = Generator(replace_eos(model, fourth))
    other.programs = generator.programs
    assert other.generate([ids], [Sampling(max_new_tokens=12)])[0][0].ids == free.ids[:first]
    marker = free.text[2:4]
    cut = run(max_new_tokens=12, stop=(marker,))
    assert (cut.text, cut.finish) == (free.text[: free.text.index(marker)], "stop")


def replace_eos(model, token):
    return Model(model.params, replace(model.config, eos_token_id=token), model.tokenizer, model.token_map, 0)


@pytest.mark.pitfall("J4")
def test_streamed_pieces_make_up_the_text(generator):
    asked = prompts(8, seed=4, longest=15)
    pieces = [[] for _ in asked]
    rules = [Sampling(temperature=2.0, seed=n, max_new_tokens=40, stop=("e",) if n == 2 else ()) for n in range(8)]
    found, _ = generator.generate(asked, rules, lambda n, piece: pieces[n].append(piece))
    for one, said in zip(found, pieces, strict=True):
        assert "".join(said) == one.text
    assert "e" not in found[2].text


@pytest.mark.pitfall("M1")
def test_a_second_sweep_over_lengths_compiles_nothing(generator):
    greedy = [Sampling(max_new_tokens=2)]
    ids = prompts(1, seed=5, longest=64)[0] + [7] * 64
    for sweep in range(2):
        before = len(generator.programs)
        for length in range(1, 65):
            generator.generate([ids[:length]], greedy)
        assert sweep == 0 or len(generator.programs) == before
    kinds = [key for key in generator.programs if key[0] != "first" and key[1] == 1]
    assert len(kinds) <= 6


def test_the_packed_cache_is_smaller_and_generates(model, generator):
    packed = Generator(model, PACKED)
    ids = prompts(2, seed=6, longest=15)
    found, speed = packed.generate(ids, [Sampling(max_new_tokens=5)] * 2)
    assert all(len(one.ids) == 5 for one in found)
    _, plain = generator.generate(ids, [Sampling(max_new_tokens=5)] * 2)
    assert speed.cache_bytes < 0.4 * plain.cache_bytes


def test_bad_prompts(generator):
    rule = [Sampling(max_new_tokens=100)]
    for ids, message in (
        ([], "nothing"),
        ([5] * 29, "29 tokens and max_new_tokens 100, allowed"),
        ([10**6], "id 1000000"),
    ):
        with pytest.raises(UserError, match=message):
            generator.generate([ids], rule)
    with pytest.raises(UserError, match="token id -1"):
        generator.generate([[3, -1]], rule)
    with pytest.raises(UserError, match=r"^prompt 2: found ''"):
        generator.encode("", "prompt 2")
    with pytest.raises(UserError, match="found none"):
        generator.generate([], [])
