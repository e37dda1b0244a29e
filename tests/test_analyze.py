"""`dsv41 analyze`: the report's numbers to their last digit, and each formula beside what this code's trees and steps count."""

import json
from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from dsv41 import cli
from dsv41.analyze import counted, steps
from dsv41.analyze.command import subject
from dsv41.analyze.contexts import USUAL
from dsv41.analyze.costs import CORE, SCORES, Reads, cache_bytes, crossover, decode_flops, prefill_flops
from dsv41.analyze.own import own_model
from dsv41.config import preset, replace, save_config
from dsv41.params import count_parameters, text_specs
from tests.models import tiny_config

NAMES = ("flash", "v4-flash", "v3.2", "v1")
# GFLOPs of a decoded token at 4k, 16k, 64k, 128k, 256k, 512k, 1m (Figure 2 of the report, recomputed).
DECODE = {
    "v1": "145.9 184.2 337.2 541.2 949.2 1765.3 3397.3",
    "v3.2": "76.4 82.5 107.1 139.9 205.4 336.3 598.3",
    "v4-flash": "16.5 17.0 19.1 21.8 27.3 38.3 60.3",
    "flash": "20.21 20.37 20.62 20.96 21.63 22.97 25.65",
}
TINY = {
    "tiny": tiny_config(),
    "V4 form": tiny_config(hc_single_pass=False, num_hash_layers=2),
    "no pool": tiny_config(candidate_source_layer_id=-1),
    "Engram in the decoder": tiny_config(engram_layer_ids=(1, 3)),
    "no encoder": tiny_config(
        compress_ratios=(1,) * 6,
        kv_source_layer_ids=(0,),
        index_source_layer_ids=(0, 4),
        candidate_source_layer_id=-1,
    ),
    "odd ratios": tiny_config(compress_ratios=(0, 5, 5, 3, 3, 3)),
    "ratio 4": tiny_config(compress_ratios=(0, 4, 4, 1, 1, 1)),
    "window only": tiny_config(
        compress_ratios=(0,) * 6,
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
        candidate_source_layer_id=-1,
        engram_layer_ids=(),
        engram_num_embeddings=(),
    ),
}
OWN = {"flash": preset("flash"), "toy": preset("toy"), **TINY}


@cache
def model(name: str):
    return own_model(OWN[name], name, name) if name in OWN else subject(name).model


def total(name: str, context: int) -> float:
    return sum(decode_flops(model(name), context).values()) / 1e9


def run_json(capsys, *argv: str) -> list[dict]:
    assert cli.run(["analyze", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_cache_bytes_of_the_report(capsys):
    rows = {row["preset"]: row for row in run_json(capsys, "kv")}
    assert [rows[name]["bytes_per_token"] for name in NAMES] == [890, 3514.25, 48068, 389120]
    assert f"{rows['v1']['ratio']:.0f} {rows['v4-flash']['ratio']:.2f}" == "437 3.95"
    # V4's store held as many bytes of windows as of rows.
    assert round(2 * rows["v4-flash"]["bytes_per_token"] / rows["flash"]["bytes_per_token"]) == 8
    assert model("flash").fixed["windows"] == 2703360
    assert sum(cache_bytes(model("flash"), 1 << 20).values()) == (890 << 20) + 2703360 + 12288 + 16


def test_active_parameters_of_the_report(capsys):
    rows = {row["preset"]: row for row in run_json(capsys, "params")}
    billions = {name: (f"{row['active'] / 1e9:.2f}", f"{row['active_in_prefill'] / 1e9:.1f}") for name, row in rows.items()}
    assert billions["flash"] == ("16.13", "7.9")
    assert billions["v4-flash"][0] == "13.27" and billions["v3.2"][0] == "37.48"
    # The encoder without layer 20's main KV and index key.
    producers = 5120 * 512 + 512 * 128
    assert f"{(rows['flash']['active_in_prefill'] - producers) / 1e9:.2f}" == "7.89"
    assert rows["flash"]["parameters"] == 748_494_684_784
    # Published sizes: 284B, and 671B without draft layers and index.
    assert f"{rows['v4-flash']['parameters'] / 1e9:.0f} {rows['v3.2']['parameters'] / 1e9:.0f}" == "284 672"


def test_decode_flops_of_the_report(capsys):
    rows = run_json(capsys, "flops", "--contexts", "4k,16k,64k..1m")
    assert {tuple(row) for row in rows} == {("preset", "context", "gflops")}
    for name, line in DECODE.items():
        digits = 2 if name == "flash" else 1
        found = [row for row in rows if row["preset"] == name]
        assert " ".join(f"{row['gflops']:.{digits}f}" for row in found) == line
        assert [row["context"] for row in found] == list(USUAL)
    split = {part: f"{flops / 1e9:.2f}" for part, flops in decode_flops(model("flash"), 4096).items()}
    # 5.07 and 1.42 of 5.0646 and 1.4156 are rounded up.
    wanted = {"routed experts": "8.49", "attention projections": "5.06", CORE: "3.22", "shared experts": "1.42", "head": "1.32"}
    assert {part: split[part] for part in wanted} == wanted


def test_growth_and_crossover_of_the_report(capsys):
    growth = lambda config: [sum(decode_flops(own_model(config, "", ""), n).values()) for n in (4096, 1 << 20)]  # noqa: E731
    whole, without = growth(OWN["flash"]), growth(replace(OWN["flash"], candidate_source_layer_id=-1))
    assert f"{whole[1] / whole[0]:.2f} {without[1] / without[0]:.2f}" == "1.27 1.69"
    assert cli.run(["analyze", "flops"]) == 0
    said = capsys.readouterr().out
    assert "from 4k to 1m: x1.27, x1.69 without the candidate pool" in said
    assert "V4.1-Flash is below V4-Flash from 107,652 tokens on" in said
    least = crossover(model("flash"), model("v4-flash"), 1 << 20)
    assert [total("flash", n) < total("v4-flash", n) for n in (least - 1, least)] == [False, True]
    # In whole multiples of 1024, 108,544.
    assert next(n for n in range(4096, 1 << 20, 1024) if total("flash", n) < total("v4-flash", n)) == 108544
    assert crossover(model("v1"), model("flash"), 1 << 20) is None


def test_prefill_is_half(capsys):
    rows = run_json(capsys, "prefill", "--contexts", "4k,1m")
    halves = [
        sum(prefill_flops(model("flash"), n).values()) / sum(prefill_flops(model("flash"), n, True).values()) for n in USUAL
    ]
    assert all(0.5 < half < 0.53 for half in halves)
    assert [f"{row['tflops']:.1f}" for row in rows if row["preset"] == "flash"] == ["39.6", "11668.8"]


@pytest.mark.parametrize(("ratio", "limit"), [(1, None), (1, 7), (2, None), (2, 5), (128, None), (4, 1)])
def test_rows_of_all_is_the_sum_of_rows(ratio, limit):
    reads = Reads(CORE, 1, 1, ratio, limit)
    for context in (1, 2, 3, 9, 10, 11, 128, 130, 400):
        assert reads.rows_of_all(context) == sum(reads.rows(n) for n in range(1, context + 1))


def test_prefill_adds_up():
    """Every layer's prefill is the decode steps it is made of, but for the head; a short prompt is all tail."""
    m, n = model("tiny"), 23
    head = next(w.active for w in m.weights if w.part == "head")
    decoded = sum(sum(decode_flops(m, i).values()) for i in range(1, n + 1)) - (n - 1) * 2 * head
    assert sum(prefill_flops(m, n, every_layer=True).values()) == pytest.approx(decoded, rel=1e-12)
    short = OWN["tiny"].sliding_window
    assert sum(prefill_flops(m, short).values()) == pytest.approx(sum(prefill_flops(m, short, True).values()), rel=1e-12)
    assert sum(prefill_flops(m, n).values()) < decoded


@pytest.mark.parametrize("name", OWN)
def test_formulas_are_the_counts_of_weights_and_cache(name):
    config, m = OWN[name], model(name)
    counts = counted.counted_weights(config)
    assert {w.part: (w.size, w.active) for w in m.weights} == {
        part: (one.size, one.active) for part, one in counts.items() if one.size
    }
    assert m.parameters == count_parameters(text_specs(config))
    for context in (1, 5, 64):
        length = context * counted.alignment(config)
        kinds = cache_bytes(m, length)
        assert kinds == {kind: size for kind, size in counted.counted_cache(config, length).items() if kind in kinds}
        assert sum(kinds.values()) == sum(counted.counted_cache(config, length).values())


@pytest.mark.parametrize(
    ("name", "tokens", "capacity", "rows"),
    [
        ("toy", 1, 4096, None),
        ("toy", 100, 4096, None),
        ("tiny", 1, 16, None),
        ("tiny", 3, 64, None),
        ("tiny", 40, 40, None),
        ("V4 form", 2, 64, None),
        ("no pool", 9, 24, None),
        ("ratio 4", 5, 48, None),
        ("window only", 6, 8, None),
        ("toy", 300, 480, 32),
        ("tiny", 40, 480, 4),
        ("tiny", 40, 480, 0),
        ("tiny", 3, 480, 4),
        ("V4 form", 9, 480, 2),
        ("Engram in the decoder", 9, 480, 4),
        ("no encoder", 9, 480, 4),
    ],
)
def test_a_step_multiplies_what_its_formula_says(name, tokens, capacity, rows):
    """rows: of the decoder, behind a chunk of a prompt; None for every token in every layer."""
    config = OWN[name]
    found = counted.counted_products(config, tokens, capacity, rows)
    assert found == steps.as_run(config, model(name), tokens, capacity, rows)


def test_rows_of_odd_ratios_agree(capsys, tmp_path):
    """Bytes a token are no whole numbers, and no exact floats, where a row stands for 3, 5 or 25 tokens."""
    for ratios in ((0, 5, 5, 3, 3, 3), (0, 25, 25, 8, 8, 8)):
        save_config(tiny_config(compress_ratios=ratios), tmp_path / "config.json")
        for what in ("kv", "memory"):
            assert cli.run(["analyze", what, "--config", str(tmp_path)]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("context", [4096, 1 << 20])
def test_the_release_decodes_within_three_percent_of_the_formula(context):
    """Abstractly, nothing is allocated. Above the formula stand the window's row that is about to leave it, the index heads'
    weighted sum (1/128 of the scores) and the streams' mixing: 0.3 % at most, 3 % allowed."""
    config, m = OWN["flash"], model("flash")
    found = counted.counted_products(config, 1, context)
    costs = steps.formats(m)
    by_part = {part: 2 * costs[part] * macs for part, macs in found.items()}
    formula = decode_flops(m, context)
    assert by_part.keys() == formula.keys()
    assert abs(sum(by_part.values()) / sum(formula.values()) - 1) < 0.003
    exact = formula.keys() - {CORE, SCORES, "mHC"}
    assert {part: by_part[part] for part in exact} == {part: formula[part] for part in exact}
    assert found == steps.as_run(config, m, 1, context)


@pytest.mark.parametrize("context", [4096, 1 << 20])
def test_the_release_prefills_as_its_formula_says(context):
    config, m = OWN["flash"], model("flash")
    found: Counter[str] = Counter()
    for times, tokens, rows in steps.chunks(config, m, context):
        count = counted.counted_products(config, tokens, context, rows)
        found.update({part: times * macs for part, macs in count.items()})
    assert found == steps.prompt_as_run(config, m, context, context)
    need, costs = steps.prompt_needed(m, context), steps.formats(m)
    # One formula in two forms: by part, and with the decoder's part of each under "tail".
    assert sum(2 * costs[p] * n for p, n in need.items()) == pytest.approx(sum(prefill_flops(m, context).values()), rel=1e-12)
    # Parts without static padding are what the model needs, the streams' mixing but for what is settled twice.
    padded = {"routed experts", CORE, SCORES}
    assert all(found[part] == need[part] for part in need.keys() - padded - {"mHC", "index keys"})
    assert all(found[part] > need[part] for part in padded)


@pytest.mark.parametrize("name", ["tiny", "window only"])
def test_chunks_are_the_prompt(name):
    config, m = OWN[name], model(name)
    for context in (1, 127, 128, 129, 256, 300):
        found = steps.chunks(config, m, context)
        assert sum(times * tokens for times, tokens, _ in found) == context
        assert all(tokens <= 32 * config.sliding_window for _, tokens, _ in found)
        assert found[-1][0] == 1 and found[-1][2] == m.tail


def test_the_counter_on_products_worked_by_hand():
    def function(w, x):
        y = jnp.einsum("oi,ti->to", w.astype(jnp.float32), x)  # 3 x 5 x 4
        y = lax.scan(lambda c, _: (jax.jit(lambda a: a @ a)(c), None), y[:3, :3], length=7)[0]  # 7 x 27
        with jax.named_scope("attention"):
            z = y @ y  # 27
        rows = w[jnp.array([0, 2])]
        return jnp.einsum("oi,ti->to", rows, x) + jnp.sum(z)  # 2 x 5 x 4

    shape = jax.ShapeDtypeStruct
    closed = jax.make_jaxpr(function)(shape((3, 4), jnp.float32), shape((5, 4), jnp.float32))
    found = list(counted._products(closed.jaxpr, {closed.jaxpr.invars[0]: "w"}, "", 1))
    assert found == [("w", 60), ("other", 189), (CORE, 27), ("w", 40)]
    loop = jax.make_jaxpr(lambda x: lax.while_loop(lambda a: a[0, 0] < 1, lambda a: a @ a, x))(shape((3, 3), jnp.float32))
    with pytest.raises(NotImplementedError, match="while"):
        list(counted._products(loop.jaxpr, {}, "", 1))


def test_xla_counts_the_products_and_the_rest():
    """XLA adds elementwise operations to the products, at these widths more than the products are, and takes a loop once."""
    config = OWN["window only"]
    cost = counted.compiled_cost(config, 1, 8)
    products = 2 * sum(counted.counted_products(config, 1, 8).values())
    assert products < cost["flops"] < 20 * products
    assert 6 * config.num_hidden_layers < cost["kernels"] < 1000
