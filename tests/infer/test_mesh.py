"""Decoding on a mesh: the ids of one device, and the same bits in every copy."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from bench.soak import Told
from dsv41 import sharding
from dsv41.cache import init_cache
from dsv41.errors import UserError
from dsv41.hf.folder import open_folder
from dsv41.hf.load import load_params
from dsv41.hf.names import key_table, text_leaves
from dsv41.hf.save import from_master, leaf_reader, write_weights
from dsv41.hf.stored import StoredWeight
from dsv41.model import extend
from dsv41.numerics import PACKED
from dsv41.params import text_specs
from infer.engine import Engine
from infer.generate import Generator
from infer.model import Model, check_decoding_mesh, load_model, place_params
from infer.prefix import PrefixCache
from infer.requests import Request
from infer.sampling import Sampling
from infer.steps import CHUNKS
from infer.store import BlockStore
from infer.windows import WindowPool
from tests.models import tiny_model

MESH = "data=2,expert=2,model=2"


@pytest.fixture(scope="module")
def model():
    """A source of pairs, one with a pool, a layer that selects within it, a table whose rows do not divide."""
    return tiny_model(
        num_hidden_layers=3,
        compress_ratios=(2, 1, 1),
        kv_source_layer_ids=(0, 1),
        index_source_layer_ids=(0, 1, 2),
        candidate_source_layer_id=1,
        engram_layer_ids=(1,),
        engram_num_embeddings=(240,),
        dspark_target_layer_ids=(0, 1, 2),
    )


@pytest.fixture(scope="module")
def spread(model):
    mesh = sharding.make_mesh(sharding.parse_mesh(MESH))
    return Model(place_params(model.params, model.config, mesh), model.config, model.tokenizer, model.token_map, 0, mesh=mesh)


@pytest.fixture(scope="module")
def alone(model):
    return Generator(model, PACKED)


@pytest.fixture(scope="module")
def asked(model, alone):
    """Five prompts of different lengths, ended at different steps, and what one device says to them."""
    prompts = [model.encode("def f(" + "a, " * n) for n in range(5)]
    assert max(map(len, prompts)) <= CHUNKS[0]
    samplings = [Sampling(max_new_tokens=6 + 5 * n, temperature=0.0 if n < 4 else 0.7, seed=3) for n in range(5)]
    return prompts, samplings, alone.generate(prompts, samplings)[0]


def same(found, wanted, last=None):
    """Ids and log-probabilities, the last ones where some are in the prompt: fp32 sums in another order, three layers deep."""
    at = slice(last and -last, None)
    assert list(found.ids) == wanted.ids[at] and found.text == wanted.text[len(wanted.text) - len(found.text) :]
    np.testing.assert_allclose(found.logprobs, wanted.logprobs[at], rtol=0, atol=1e-4)


def behind(asked, last):
    """The same requests for their last tokens alone."""
    prompts, samplings, wanted = asked
    ids = [[*prompt, *one.ids[:-last]] for prompt, one in zip(prompts, wanted, strict=True)]
    return ids, [replace(sampling, max_new_tokens=last) for sampling in samplings]


def test_ids_on_a_mesh_are_those_of_one_device(asked, spread, tmp_path):
    """On four parts of eight rows; and behind what the first ones left in a file."""
    prompts, samplings, wanted = asked
    prefix = PrefixCache(spread, PACKED, "full", 8, BlockStore(tmp_path / "a.db"))
    generator = Generator(spread, PACKED, prefix=prefix)
    found, _ = generator.generate(prompts, samplings)
    prefix.flush()
    again, _ = generator.generate(*behind(asked, 3))
    prefix.close()
    assert sum(one.cached_tokens > 0 for one in again) > 2
    for a, b, c in zip(found, again, wanted, strict=True):
        same(a, c)
        same(b, c, 3)
    held = [a for a in jax.tree.leaves(spread.params) if not a.sharding.is_fully_replicated]
    assert len(held) > 10
    table = spread.params.layers[1].engram.embed
    assert table.shape[0] % 8 == 0 and table.addressable_shards[0].data.shape[0] == table.shape[0] // 4


@pytest.mark.pitfall("M1", "M3")
def test_an_engine_on_a_mesh_says_what_one_device_says(asked, spread):
    """Ten requests in eight slots, two to each part with six pages of 8 tokens, of which one request may want all.

    Then requests that begin with what those left: pages of their own part, snapshots of any.
    """
    prompts, samplings, wanted = asked
    prefix = PrefixCache(spread, PACKED, "full", 8, windows=WindowPool())
    engine = Engine(spread, PACKED, slots=8, longest=48, page=8, pages=24, chunks=(16,), block=5, prefix=prefix)
    engine.device.widths = [6]  # one width of table, or twice as much is compiled
    told = [Told() for _ in range(10)]
    for n, one in enumerate(told):
        engine.submit(Request(prompts[n % 5], samplings[n % 5]), one.hear)
    fills, fill = [], engine.device.fill
    engine.device.fill = lambda chunks: (fills.append(len(chunks)), fill(chunks))[1]
    engine.step()
    # A prompt of each part is filled at once, and its pages are the part's own.
    assert fills[0] == 4 and all(engine.device.shard(job.slot) == page // 7 for job in engine._running() for page in job.pages)
    while engine.step():
        pass
    for n, one in enumerate(told):
        same(one, wanted[n % 5])
        assert one.last.finish == wanted[n % 5].finish
    programs = engine.device.compiled()
    told = [Told() for _ in range(5)]
    for ids, sampling, one in zip(*behind(asked, 3), told, strict=True):
        engine.submit(Request(ids, sampling), one.hear)
    while engine.step():
        pass
    for one, other in zip(told, wanted, strict=True):
        same(one, other, 3)
    assert sum(one.last.usage.cached_tokens > 0 for one in told) > 1
    # One more for those that begin behind something, none for a cache that lies otherwise.
    assert engine.device.compiled() == programs + 1
    assert engine.metrics().preempted > 0 and engine.metrics().free_pages < 24
    engine._reuse.forget()
    assert engine.allocator.free == 24
    pool = engine.device.cache.sources[0].main_kv
    assert pool.shape[0] == 28 and {s.data.shape[0] for s in pool.addressable_shards} == {7}


def test_every_copy_selects_and_keeps_the_same_bits(model, spread):
    """Devices along ``model``: selected ids, candidate blocks, and all that the cache holds."""
    config, rows = model.config, P(sharding.ROWS)
    ids = np.random.default_rng(0).integers(3, config.vocab_size, (8, 12)).astype(np.int32)
    live = np.arange(12)[None] < np.arange(5, 13)[:, None]
    cache = jax.device_put(init_cache(config, PACKED, 8, 16), jax.sharding.NamedSharding(spread.mesh, rows))

    def run(params, cache, ids, live):
        taps = {}
        _, cache = extend(params, config, PACKED, cache, ids, live, jnp.asarray(model.token_map, jnp.int32), taps=taps)
        found = {name: a for name, a in taps.items() if name.endswith((".topk", ".candidates"))}
        return jax.tree.map(lambda a: a[None], (found, cache))

    weights = jax.tree.map(lambda s: s.spec, sharding.shardings(text_specs(config), spread.mesh, stored=()))
    out = P("model", sharding.ROWS)
    run = jax.jit(jax.shard_map(run, mesh=spread.mesh, in_specs=(weights, rows, rows, rows), out_specs=out, check_vma=False))
    found, cache = jax.device_get(run(spread.params, cache, ids, live))
    assert len(found) == 4 and all(np.any(a >= 0) for a in found.values())
    for first, second in (a for a in jax.tree.leaves((found, cache)) if a.size):
        np.testing.assert_array_equal(first, second)


def test_what_a_mesh_cannot_decode_is_refused(model, spread):
    with pytest.raises(UserError, match="mesh: found 'context=2', allowed behind a cache is 'context=1'"):
        check_decoding_mesh(sharding.parse_mesh("context=2"), model.config)
    for sizes, says in (
        ({"slots": 6}, "slots: found 6, allowed on this mesh is a multiple of 4; nearest is 8"),
        ({"slots": 8, "pages": 3}, "pages: found 3, allowed on this mesh is a multiple of 4; nearest is 4"),
    ):
        with pytest.raises(UserError, match=says):
            Engine(spread, **sizes)


def test_released_weights_lie_on_a_mesh_as_they_are_stored(model, alone, asked, tmp_path):
    """FP4 experts and FP8 rows, codes and scales in the same parts; the ids of their masters on one device."""
    config = model.config
    read = leaf_reader(dict(zip(text_leaves(config), jax.tree.leaves(model.params), strict=True)))
    slots = [slot for slot in key_table(config).values() if slot.part == "text"]
    units = [from_master(s, config, "release", lambda s=s: read(s.path, s.expert), None) for s in slots]
    (tmp_path / "release").mkdir()
    write_weights(tmp_path / "release", units, config)
    (tmp_path / "release" / "tokenizer.json").write_text(model.tokenizer.to_str())
    many, one = load_model(tmp_path / "release", MESH), load_model(tmp_path / "release")
    masters = load_params(open_folder(tmp_path / "release", parts=("text",)))
    is_stored = lambda x: isinstance(x, StoredWeight)  # noqa: E731
    for params in (many.params, one.params):
        held, plain = (jax.tree.leaves(p, is_leaf=is_stored) for p in (params, masters))
        assert sum(map(is_stored, held)) == 3 * 3 + 1
        for a, b in zip(held, plain, strict=True):
            values = np.asarray(a.dequantize() if is_stored(a) else a)
            np.testing.assert_array_equal(values[: len(b)], b)
            assert not np.any(values[len(b) :])
    experts, table = many.params.layers[0].ffn.experts.w1, many.params.layers[1].engram.embed
    for array, parts in ((experts.codes, 4), (experts.scales, 4), (table.codes, 4), (table.scales, 4)):
        assert array.addressable_shards[0].data.shape[0] * parts == array.shape[0]
    prompts, samplings, _ = asked
    plain = Generator(replace(model, params=masters), PACKED)
    plain.programs = alone.programs
    wanted, _ = plain.generate(prompts, samplings)
    found, _ = Generator(many, PACKED).generate(prompts, samplings)
    for a, b in zip(found, wanted, strict=True):
        same(a, b)
