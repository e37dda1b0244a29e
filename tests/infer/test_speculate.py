"""Speculation: forced acceptances give plain greedy tokens and the state of what was never drafted; sampling keeps its law."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41.cache import init_cache
from dsv41.errors import UserError
from infer.generate import Generator, Speed
from infer.model import Model
from infer.rounds import Rounds
from infer.sampling import Sampling, distribution, pick, sample, sampling_rows
from infer.schedule import Drafting
from infer.speculate import Ahead, Verified, judge
from tests.models import PLAIN, close, drafting_config, tiny_draft, tiny_model, tiny_params

CONFIG = drafting_config()
SLOTS = CONFIG.dspark_block_size
LENGTHS = (7, 8, 4, 5)
ROWS, ROOM, WIDTH = len(LENGTHS), 64, 16
GREEDY = sampling_rows([Sampling()] * ROWS)
NO_END = jnp.full((ROWS, 4), -1, jnp.int32)


class Rig:
    """Prompts of odd and even lengths in a cache, their plain greedy continuations, and the states along these.

    By a generator's own programs: one token of each row in a chunk of prefill is a plain step.
    """

    def __init__(self):
        fold = np.arange(CONFIG.vocab_size, dtype=np.int32)
        self.model = Model(tiny_params(CONFIG), CONFIG, tiny_model().tokenizer, fold, 0, draft=tiny_draft(CONFIG))
        self.generator = Generator(self.model, drafting=Drafting("fixed"))
        self.ids = np.random.default_rng(0).integers(3, CONFIG.vocab_size, (ROWS, max(LENGTHS))).astype(np.int32)
        self.tokens, self.states = [], [init_cache(CONFIG, PLAIN, ROWS, ROOM, drafts=True)]
        self._plain(self.ids, np.asarray(LENGTHS))
        self.states.pop(0)
        for _ in range(2 * SLOTS + 3):
            self._plain(self.tokens[-1][:, None], np.ones(ROWS, int))

    def _plain(self, ids, count):
        ids = np.pad(ids, ((0, 0), (0, WIDTH - ids.shape[1])))
        live = jnp.asarray(np.arange(WIDTH)[None] < count[:, None])
        last, end = jnp.zeros((ROWS, CONFIG.vocab_size), jnp.float32), jnp.full((ROWS,), ROOM, jnp.int32)
        cache = jax.tree.map(jnp.copy, self.states[-1])  # it is donated
        args = (self.generator._weights, cache, jnp.asarray(ids), live, end, last)
        logits, cache = self.generator._call(Speed(), "prefill", (ROWS, ROOM, WIDTH), *args)
        self.tokens.append(np.asarray(jnp.argmax(logits, axis=-1), np.int32))
        self.states.append(cache)

    def drafts(self, at, right, filler=None):
        """Of each row behind token ``at`` of its continuation, as many right drafts as said and wrong ones behind them."""
        drafts = np.stack([[self.tokens[at[n] + 1 + k][n] for k in range(SLOTS)] for n in range(ROWS)])
        wrong = (drafts + 1) % CONFIG.vocab_size if filler is None else np.full_like(drafts, filler)
        drafts = jnp.asarray(np.where(np.arange(SLOTS) < np.asarray(right)[:, None], drafts, wrong), jnp.int32)
        probs = jax.nn.one_hot(drafts, CONFIG.vocab_size, dtype=jnp.float32)
        return Ahead(drafts, probs, jnp.zeros((ROWS, SLOTS), jnp.float32))

    def step(self, cache, at, ahead, lengths, left=(99,) * ROWS, ends=NO_END):
        token = jnp.asarray([self.tokens[at[n]][n] for n in range(ROWS)], jnp.int32)
        args = (token, ahead, jnp.asarray(lengths, jnp.int32), jnp.asarray(left, jnp.int32), ends, GREEDY)
        held = (self.generator._weights, jax.tree.map(jnp.copy, cache))
        done, cache, _ = self.generator._call(Speed(), f"verify {SLOTS + 1}", (ROWS, ROOM, 4), *held, *args)
        return done, cache

    def plain(self, at, count):
        return [[int(self.tokens[at[n] + 1 + k][n]) for k in range(count[n])] for n in range(ROWS)]


@pytest.fixture(scope="module")
def rig():
    return Rig()


def made(done):
    return [[int(t) for t in row if t >= 0] for row in np.asarray(done.tokens)]


def reachable(cache):
    """The state without entries past the length, which nobody sees."""
    sources = []
    for source, ratio in zip(cache.sources, (2, 1), strict=True):
        keep = (jnp.arange(source.main_kv.shape[1])[None] < (cache.length // ratio)[:, None])[..., None]
        rows = {"main_kv": source.main_kv, "index_k": source.index_k}
        sources.append(replace(source, **{name: jnp.where(keep, a, 0) for name, a in rows.items()}))
    return replace(cache, sources=tuple(sources))


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, reachable(a), reachable(b))


@pytest.mark.pitfall("I3", "I2")
def test_every_forced_acceptance_is_plain_greedy_and_leaves_no_trace(rig):
    """All of 0 to 5 accepted, from odd and even positions; then a round of each again, behind the state that it left.

    The state is to the bit that of a step which was given the accepted drafts alone, and that of plain steps but for fp32 sums in
    another order (`close`).
    """
    for right in range(SLOTS + 1):
        cache, at = rig.states[0], [0] * ROWS
        for again in (right, SLOTS - right):
            ahead = rig.drafts(at, [again] * ROWS)
            done, after = rig.step(cache, at, ahead, [SLOTS] * ROWS)
            assert made(done) == rig.plain(at, [again + 1] * ROWS)
            assert done.accepted.tolist() == [again] * ROWS
            never, clean = rig.step(cache, at, rig.drafts(at, [again] * ROWS, filler=7), [again] * ROWS)
            assert made(never) == made(done)
            same(after, clean)
            at = [n + again + 1 for n in at]
            jax.tree.map(close, reachable(after), reachable(rig.states[at[0]]))
            cache = after


@pytest.mark.pitfall("I5")
def test_rows_of_a_step_accept_their_own(rig):
    """Acceptances 0, 2, 5 and 3 in one step are those of four steps in which the others have nothing to do."""
    at, ahead = [0] * ROWS, rig.drafts([0] * ROWS, [0, 2, 5, 3])
    done, after = rig.step(rig.states[0], at, ahead, [SLOTS] * ROWS)
    assert made(done) == rig.plain(at, [1, 3, 6, 4]) and done.left.tolist() == [98, 96, 93, 95]
    for n in range(ROWS):
        left = [99 if n == m else 0 for m in range(ROWS)]
        alone, state = rig.step(rig.states[0], at, ahead, [SLOTS] * ROWS, left)
        assert made(alone) == [row if n == m else [] for m, row in enumerate(made(done))]
        for m in range(ROWS):
            state_of = after if n == m else rig.states[0]
            jax.tree.map(lambda a, b, m=m: np.testing.assert_array_equal(a[m], b[m]), reachable(state), reachable(state_of))
    # What each goes on to from there.
    at = [1, 3, 6, 4]
    done, _ = rig.step(after, at, rig.drafts(at, [5, 1, 0, 2]), [SLOTS] * ROWS)
    assert made(done) == rig.plain(at, [6, 2, 1, 3])


def test_ends_and_limits_inside_the_accepted_drafts(rig):
    """Nothing is committed past an end token or the last wanted one: the state is that of a plain stop there."""
    at, ahead = [0] * ROWS, rig.drafts([0] * ROWS, [5] * ROWS)
    said = [[int(row[n]) for row in rig.tokens] for n in range(ROWS)]
    ends = NO_END.at[0, 1].set(said[0][2]).at[2, 0].set(said[2][4])
    done, after = rig.step(rig.states[0], at, ahead, [SLOTS] * ROWS, [99, 3, 99, 1], ends)
    count = [said[0].index(said[0][2], 1), 3, said[2].index(said[2][4], 1), 1]
    assert made(done) == rig.plain(at, count)
    assert done.left.tolist() == [0] * ROWS and done.last.tolist() == [row[-1] for row in made(done)]
    assert (after.length - rig.states[0].length).tolist() == count
    _, clean = rig.step(rig.states[0], at, rig.drafts(at, [n - 1 for n in count], 7), [n - 1 for n in count])
    same(after, clean)


def test_a_batch_generates_what_it_does_without_drafts(rig):
    """Prompts at once through prefill, drafts and verification: the plain greedy tokens, up to an end where there is one."""
    prompts = [rig.ids[n, :length].tolist() for n, length in enumerate(LENGTHS)]
    wanted = [9, 6, 10, 1]
    compiled = set(rig.generator.programs)
    found, speed = rig.generator.generate(prompts, [Sampling(max_new_tokens=n) for n in wanted])
    assert {kind for kind, *_ in set(rig.generator.programs) - compiled} == {"first", "draft"}
    for n, one in enumerate(found):
        plain = [int(tokens[n]) for tokens in rig.tokens[: wanted[n]]]
        end = plain.index(CONFIG.eos_token_id) if CONFIG.eos_token_id in plain else len(plain)
        assert one.ids == plain[:end] and one.finish == ("length" if end == len(plain) else "stop")
    assert speed.rounds >= 3 and speed.drafted >= 2 * SLOTS
    with pytest.raises(UserError, match="without a drafter"):
        Generator(replace(rig.model, draft=None), drafting=Drafting("fixed"))


def test_rounds_run_the_narrowest_step_that_holds_the_drafts():
    """Trusted drafts decide the width; the curve that the scheduler weighs by is measured once, on copies."""
    called = []

    def call(name, *args, timed=True):
        called.append((name, timed))
        ahead = Ahead(jnp.zeros((2, SLOTS), jnp.int32), jnp.zeros((2, SLOTS, 4)), jnp.asarray(confidence, jnp.float32))
        if name == "draft":
            return ahead
        width = int(name.split()[1])
        zeros = jnp.zeros((2,), jnp.int32)
        return Verified(jnp.zeros((2, width), jnp.int32), jnp.zeros((2, width)), zeros, zeros, zeros), args[0], ahead

    def widths(mode, left, count=2, **rule):
        called.clear()
        rounds = Rounds(Drafting(mode, **rule), CONFIG, call)
        for _ in range(count):
            rounds.step(empty, jnp.zeros((2,), jnp.int32), np.asarray(left, np.int32), NO_END, GREEDY)
        return [name for name, timed in called if timed and name != "draft"], [name for name, timed in called if not timed]

    empty = init_cache(CONFIG, PLAIN, 2, 2)
    confidence = [[5, 5, -5, 5, 5], [-5, 5, 5, 5, 5]]
    assert widths("threshold", [9, 9])[0] == ["verify 4", "verify 4"]
    assert widths("threshold", [0, 9])[0] == ["verify 2", "verify 2"]
    assert widths("fixed", [9, 9], length=1)[0] == ["verify 2", "verify 2"]
    assert widths("fixed", [3, 2])[0] == ["verify 6", "verify 6"]
    ran, measured = widths("scheduled", [9, 9])
    assert len(ran) == 2 and measured == ["verify 2"] * 4 + ["verify 4"] * 4 + ["verify 6"] * 4


def chain(seed, vocab):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((vocab, vocab)) * 1.2, jnp.float32)


def many(rule, count):
    """Rows of one rule that differ by their seeds."""
    rows = jax.tree.map(lambda a: jnp.repeat(a, count), sampling_rows([Sampling(**rule)]))
    return replace(rows, seed=jnp.arange(count, dtype=jnp.uint32))


def drafted(logits_of, first, position, rows, slots):
    """Drafts by a chain, as `infer.speculate.look_ahead` draws them."""
    tokens, q, last = [], [], first
    for k in range(slots):
        q.append(distribution(logits_of(k, last)[:, None], rows)[:, 0])
        last = pick(q[-1], position + k, rows, 1)
        tokens.append(last)
    return Ahead(jnp.stack(tokens, axis=1), jnp.stack(q, axis=1), jnp.zeros((len(first), slots), jnp.float32))


def test_speculation_keeps_the_law_of_sampling():
    """Two Markov chains, one drafting for the other: three tokens of 10,000 draws, by chi-square against their exact law.

    Rounds of one and two drafts, so that all of a round's places are among the three. A false alarm once in 10,000 for other
    seeds; these are fixed.
    """
    vocab, count, slots = 5, 10_000, 2
    target, drafter = chain(1, vocab), chain(2, vocab) * 0.5 + chain(1, vocab) * 0.7
    numbers = jnp.arange(count, dtype=jnp.int32)

    @jax.jit
    def round(rows, said, have):
        before = jnp.where(have > 0, jnp.take_along_axis(said, jnp.maximum(have - 1, 0)[:, None], axis=1)[:, 0], 0)
        ahead = drafted(lambda _, last: drafter[last], before, 1 + have, rows, slots)
        inputs = jnp.concatenate([before[:, None], ahead.tokens], axis=1)
        tokens, accepted = judge(target[inputs], ahead, jnp.where(numbers % 3 == 0, 1, slots).astype(jnp.int32), 1 + have, rows)
        for k in range(slots + 1):
            said = said.at[numbers, jnp.where(k <= accepted, have + k, 3)].set(tokens[:, k], mode="drop")
        return said, jnp.minimum(have + accepted + 1, 3)

    @jax.jit
    def plain(rows, last, k):
        return sample(target[last], jnp.full((count,), 1, jnp.int32) + k, rows)[0]

    for rule in ({"temperature": 1.0}, {"temperature": 0.9, "top_p": 0.8}):
        rows, said, have = many(rule, count), jnp.full((count, 3), -1, jnp.int32), jnp.zeros((count,), jnp.int32)
        for _ in range(3):
            said, have = round(rows, said, have)
        last, alone = jnp.zeros((count,), jnp.int32), []
        for k in range(3):
            last = plain(rows, last, jnp.int32(k))
            alone.append(last)
        step = np.asarray(distribution(target[None], many(rule, 1))[0], np.float64)
        want = count * np.einsum("a,ab,bc->abc", step[0], step, step).reshape(-1)
        for found in (np.asarray(said), np.stack(alone, axis=1)):
            got = np.bincount(np.ravel_multi_index(found.T, (vocab,) * 3), minlength=vocab**3)
            assert got[want == 0].sum() == 0
            # Cells that expect fewer than 5 are one.
            small = want < 5
            seen, expected = (np.append(a[~small], a[small].sum()) for a in (got, want))
            statistic, free = ((seen - expected) ** 2 / np.maximum(expected, 1e-9)).sum(), len(expected) - 1
            # Wilson and Hilferty's normal form of chi-square, at 3.7 standard deviations.
            assert statistic < free * (1 - 2 / (9 * free) + 3.7 * (2 / (9 * free)) ** 0.5) ** 3


@pytest.mark.pitfall("I6")
def test_a_drafter_that_is_the_model_is_always_accepted():
    vocab, count = 5, 256
    rows, logits = many({"temperature": 1.0, "top_p": 0.9}, count), chain(3, vocab)[:3]
    one = jnp.ones((count,), jnp.int32)
    ahead = drafted(lambda k, _: jnp.broadcast_to(logits[k], (count, vocab)), 0 * one, one, rows, 2)
    _, accepted = judge(jnp.broadcast_to(logits[None], (count, 3, vocab)), ahead, 2 * one, one, rows)
    assert set(accepted.tolist()) == {2}
