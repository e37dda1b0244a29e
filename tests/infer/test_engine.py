"""The engine: what a request gets beside any others is what it gets alone, and nothing is left behind."""

import json
import threading

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import serving
from bench.soak import Told, soak
from dsv41.errors import UserError
from dsv41.hashing import table_primes
from dsv41.numerics import PACKED
from infer.allocator import PageAllocator
from infer.engine import Engine
from infer.generate import Generator
from infer.requests import Request
from infer.sampling import Sampling
from tests.models import tiny_model

FOUR_LAYERS = {
    "num_hidden_layers": 4,
    "compress_ratios": (0, 2, 1, 1),
    "kv_source_layer_ids": (1, 2),
    "index_source_layer_ids": (1, 2, 3),
    "candidate_source_layer_id": 2,
    "engram_layer_ids": (1,),
    "engram_num_embeddings": (sum(table_primes(1, 3, 2, 53)[0]),),
    "dspark_target_layer_ids": (1, 2, 3),
}


class Clock:
    """Seconds that pass when told to."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture(scope="module")
def clock():
    return Clock()


@pytest.fixture(scope="module")
def engine(clock):
    """Three slots and seven pages, of which one request may want three."""
    engine = Engine(
        tiny_model(**FOUR_LAYERS),
        PACKED,
        decoder_replay="bounded",
        slots=3,
        longest=48,
        page=16,
        pages=7,
        chunks=(16,),
        block=5,
        clock=clock,
    )
    engine.warm_up()
    return engine


def drain(engine):
    while engine.step():
        pass
    now = engine.metrics()
    assert (now.free_pages, now.running, now.waiting) == (now.pages, 0, 0)


def ask(engine, ids, logprobs=0, priority=0, **rule):
    told = Told()
    told.id = engine.submit(Request(ids, Sampling(**rule), logprobs, priority), told.hear)
    return told


def prompt(size, seed=0):
    return [0, *np.random.default_rng(seed).integers(3, 280, size - 1).tolist()]


@pytest.mark.pitfall("O1", "O2", "O4", "M1")
def test_a_soak_leaves_nothing_behind_and_nothing_wrong(engine):
    compiled = []
    listen = lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        found = soak(engine, 60, 0)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    print(found.line())
    assert not found.wrong and found.apart == 0
    assert found.free_pages == found.pages and found.compiled_later == 0 and not compiled
    assert found.preempted > 5 and found.aborted > 1 and found.joined > 20


@pytest.mark.pitfall("O1")
def test_requests_get_what_a_batch_behind_a_dense_cache_gets(engine, monkeypatch):
    monkeypatch.setattr("infer.generate.CHUNKS", (16,))
    generator = Generator(engine.model, PACKED, "bounded")
    asked = [prompt(size, size) for size in (1, 17, 30, 8)]
    rules = [{"max_new_tokens": 18, "temperature": 0.9 * (n % 2), "seed": n, "stop": ("e",) * (n == 3)} for n in range(4)]
    want, _ = generator.generate(asked, [Sampling(**rule) for rule in rules])
    told = [ask(engine, ids, **rule) for ids, rule in zip(asked, rules, strict=True)]
    drain(engine)
    for one, other in zip(told, want, strict=True):
        assert (one.ids, one.text, one.last.finish) == (other.ids, other.text, other.finish)
        # Both are float32 sums over rows of the same bytes; in batches of three and four they may be in another order.
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=2e-5)


@pytest.mark.pitfall("J4", "J5")
def test_what_is_told(engine):
    ids = prompt(20)
    none, one, free, three = (ask(engine, ids, new == 12 and 3, max_new_tokens=new) for new in (0, 1, 12, 11))
    drain(engine)
    assert (none.ids, none.text, none.last.finish, none.last.usage.new_tokens) == ([], "", "length", 0)
    assert (one.ids, three.ids) == (free.ids[:1], free.ids[:11]) and free.last.finish == "length"
    assert free.text == engine.model.tokenizer.decode(free.ids)
    assert (free.last.usage.prompt_tokens, free.last.usage.cached_tokens, free.last.usage.new_tokens) == (20, 0, 12)
    assert one.likeliest == [()]
    for id, logprob, likeliest in zip(free.ids, free.logprobs, free.likeliest, strict=True):
        assert likeliest[0] == (id, logprob) and len(likeliest) == 3
        assert sorted((value for _, value in likeliest), reverse=True) == [value for _, value in likeliest]
    stopped = ask(engine, ids, max_new_tokens=12, stop_ids=(free.ids[5],))
    cut = ask(engine, ids, max_new_tokens=12, stop=(free.text[2:4],))
    drain(engine)
    assert stopped.ids == free.ids[: free.ids.index(free.ids[5])] and stopped.last.finish == "stop"
    # As many as there may be, beside the model's own end.
    others = [id for id in range(3, 280) if id not in free.ids][:15]
    most = ask(engine, ids, max_new_tokens=12, stop_ids=(*others, max(free.ids)))
    drain(engine)
    assert most.ids == free.ids[: free.ids.index(max(free.ids))] and most.last.finish == "stop"
    assert cut.text == free.text[: free.text.index(free.text[2:4])] and cut.last.finish == "stop"


def test_a_request_may_be_aborted_in_any_state(engine):
    whole = ask(engine, prompt(40), max_new_tokens=8)
    drain(engine)
    queued, filling, decoding, other = (ask(engine, prompt(40), max_new_tokens=8) for _ in range(4))
    engine.abort(queued.id)
    while not decoding.ids:
        engine.step()
        if filling is not None and engine._jobs[filling.id].filled == 16:
            engine.abort(filling.id)
            aborted, filling = filling, None
    engine.abort(decoding.id)
    for id in (whole.id, 10**6):
        engine.abort(id)
    drain(engine)
    assert [one.last.finish for one in (queued, aborted, decoding, other)] == ["abort", "abort", "abort", "length"]
    assert (queued.ids, aborted.ids) == ([], []) and decoding.ids == whole.ids[: len(decoding.ids)]
    assert (other.ids, other.logprobs) == (whole.ids, whole.logprobs)


def test_a_higher_priority_takes_a_place(engine):
    alone = ask(engine, prompt(6), max_new_tokens=40)
    drain(engine)
    before = engine.metrics().preempted
    low = [ask(engine, prompt(6), priority=2, max_new_tokens=40) for _ in range(3)]
    while not low[2].ids:
        engine.step()
    high = ask(engine, prompt(9), priority=1, max_new_tokens=5)
    while not high.last:
        engine.step()
    assert engine.metrics().preempted > before and not any(one.last for one in low)
    drain(engine)
    assert all((one.ids, one.logprobs) == (alone.ids, alone.logprobs) for one in low)


@pytest.mark.pitfall("M3")
def test_a_step_that_fails_ends_its_own_requests_alone(engine, monkeypatch):
    alone = ask(engine, prompt(40), max_new_tokens=8)
    drain(engine)
    for name in ("decode", "fill"):
        first, second = ask(engine, prompt(5), max_new_tokens=20), ask(engine, prompt(40), max_new_tokens=8)
        while not first.ids:
            engine.step()

        def fail(*_):
            jax.tree.map(lambda a: a.delete(), engine.device.cache)
            raise RuntimeError("out of\nmemory")

        with monkeypatch.context() as patch:
            patch.setattr(engine.device, name, fail)
            engine.step()
        drain(engine)
        wrong, right = (first, second) if name == "decode" else (second, first)
        assert (wrong.last.finish, wrong.last.error) == ("error", "RuntimeError: out of memory")
        assert right.last.finish == "length" and right.last.error is None
        assert name == "fill" or (right.ids, right.logprobs) == (alone.ids, alone.logprobs)


@pytest.mark.pitfall("H1")
def test_logits_that_are_no_numbers_end_a_request(engine, monkeypatch):
    """Beside one whose logits are."""
    right, wrong = (ask(engine, prompt(5, seed), max_new_tokens=20) for seed in (0, 1))
    while not wrong.ids:
        engine.step()
    decode, slot, made = engine.device.decode, engine._jobs[wrong.id].slot, len(wrong.ids)

    def damaged(*args):
        drawn = decode(*args)
        values = np.array(drawn.logprobs)
        values[2:, slot] = np.nan
        return drawn.replace(logprobs=values)

    with monkeypatch.context() as patch:
        patch.setattr(engine.device, "decode", damaged)
        while not wrong.last:
            engine.step()
    drain(engine)
    assert wrong.last.finish == "error" and "NaN" in wrong.last.error and len(wrong.ids) == made + 2
    assert np.isfinite(wrong.logprobs).all() and len(right.ids) == 20


def test_a_callback_that_raises_ends_its_request_alone(engine):
    def hear(_):
        raise OSError("nobody listens")

    errors = engine.metrics().finished["error"]
    engine.submit(Request(prompt(5), Sampling(max_new_tokens=20)), hear)
    other = ask(engine, prompt(5), max_new_tokens=20)
    drain(engine)
    assert len(other.ids) == 20 and engine.metrics().finished["error"] == errors + 1


def test_threads_may_submit_and_abort(engine):
    told, done = [], threading.Event()

    def submit(seed):
        for n in range(5):
            one = ask(engine, prompt(4 + n, seed), max_new_tokens=4 + n)
            one.size = 4 + n
            told.append(one)
            if n == 4:
                engine.abort(one.id)

    def step():
        while not done.is_set() or engine.step():
            if engine.wait(0.01):
                engine.step()

    threads = [threading.Thread(target=submit, args=(seed,)) for seed in range(3)]
    stepper = threading.Thread(target=step)
    for thread in (stepper, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    stepper.join()
    assert not engine.wait(0) and len({one.id for one in told}) == 15
    assert all(one.last.finish in (("length", "abort") if one.size == 8 else ("length",)) for one in told)
    assert all(len(one.ids) == one.size for one in told if one.last.finish == "length")


def test_metrics_count_tokens_and_seconds(engine, clock):
    before = engine.metrics()
    told = ask(engine, prompt(20), max_new_tokens=6)
    assert engine.metrics().waiting == 1
    clock.now += 3
    while not told.ids:
        engine.step()
    now = engine.metrics()
    assert (now.running, now.waiting, now.pages - now.free_pages) == (1, 0, 2)
    clock.now += 10
    drain(engine)
    after = engine.metrics()
    added = lambda name: getattr(after, name) - getattr(before, name)  # noqa: E731
    assert (added("prompt_tokens"), added("new_tokens"), added("cached_tokens")) == (20, 6, 0)
    pairs = [np.subtract(getattr(after, name), getattr(before, name)) for name in ("time_to_first_token", "time_per_token")]
    assert np.array(pairs).tolist() == [[1, 3], [5, 10]]
    assert after.finished["length"] == before.finished["length"] + 1


def test_benchmarks_time_what_they_say(engine, monkeypatch, capsys, tmp_path):
    """Contexts and counts of tokens; of times, that there are some."""
    monkeypatch.setattr(serving, "PAGE", 16)
    monkeypatch.setattr(serving, "open_model", lambda options: engine.model)
    serving.run("decode", ["16"], None, serving.Options(batch=2))
    serving.run("prefill", ["16"], tmp_path / "prefill.json", serving.Options())
    row = serving.serve(engine.model, 5, 2, "bounded", longest=16, chunks=(16,))[0]
    assert row.more["new_tokens"] >= 5 and row.tokens_per_second > 0 and row.more["first_token_seconds"] > 0
    full, bounded = json.loads((tmp_path / "prefill.json").read_text())["results"]
    assert (full["what"], bounded["what"]) == ("prefill full", "prefill bounded")
    assert full["more"]["flops_of_full"] == 1 and 0 < bounded["more"]["flops_of_full"] < 1
    said = capsys.readouterr().out
    assert "decode      16 context    2 requests" in said and "serve   5 requests in 2 slots" in said
    for what, words, changes, message in (
        ("serve", ["a"], {}, "serve: found 'a'"),
        ("decode", ["4x"], {}, "contexts: found '4x'"),
        ("decode", [], {"batch": 0}, "batch: found 0"),
    ):
        with pytest.raises(UserError, match=message):
            serving.run(what, words, None, serving.Options(**changes))


def test_random_weights_are_not_made_of_what_no_machine_holds():
    with pytest.raises(UserError, match=r"found 'flash', allowed are slice, toy, small, forty"):
        serving.open_model(serving.Options(preset="flash"))


def test_what_can_never_run_is_refused(engine):
    for ids, changes, message in (
        ([], {}, "prompt: found nothing"),
        ([5] * 20, {"max_new_tokens": 29}, "found 20 tokens and max_new_tokens 29, allowed is 48 together"),
        ([10**6], {}, "token id 1000000"),
        ([5], {"stop_ids": (10**6,)}, "stop_ids: found token id 1000000"),
        ([5], {"logprobs": 21}, "logprobs: found 21, allowed is 0 to 20"),
    ):
        with pytest.raises(UserError, match=message):
            ask(engine, ids, **{"max_new_tokens": 3, **changes})
    for changes, message in (
        ({"page": 3}, "page: found 3, allowed is a positive multiple of 2"),
        ({"slots": 0}, "slots: found 0, allowed is 1 or more"),
        ({"block": 17}, "block: found 17, allowed is 1 to 16"),
        ({"longest": 129}, "longest: found 129, allowed is 1 to 128"),
        ({"pages": 0}, "pages: found 0"),
    ):
        with pytest.raises(UserError, match=message):
            Engine(engine.model, **changes)


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 6)), max_size=40))
def test_pages_are_free_once_nobody_holds_them(moves):
    pages, held = PageAllocator(5), []
    for what, n in moves:
        if what == "take":
            taken = pages.take(n)
            assert (taken is None) == (n > 5 - len(set(held)))
            assert not set(taken or []) & set(held)
            held += taken or []
        elif held:
            page = held[n % len(held)]
            (pages.share if what == "share" else pages.release)([page])
            held.append(page) if what == "share" else held.remove(page)
        assert pages.free == 5 - len(set(held)) and all(pages.holders(page) == held.count(page) for page in range(1, 6))
    for page in {*range(1, 6)} - set(held) | {0}:
        with pytest.raises(ValueError, match="nobody holds"):
            pages.release([page])
