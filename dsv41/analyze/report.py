"""What `dsv41 analyze` says: rows for machines, a table for people, closing lines; of one model, or of several side by side."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsv41.analyze import counted, steps
from dsv41.analyze.contexts import spell
from dsv41.analyze.costs import CORE, SCORES, Model, cache_bytes, crossover, decode_flops, prefill_flops
from dsv41.analyze.own import own_model
from dsv41.config import ModelConfig, replace
from dsv41.errors import UserError
from dsv41.prefill import halo_rows
from dsv41.validate import MOST

Row = dict[str, Any]
TOTAL = "all"


@dataclass(frozen=True)
class Subject:
    """A model to report on; config: where it is one of this code, whose numbers can be counted."""

    model: Model
    config: ModelConfig | None = None


@dataclass
class Report:
    """rows: one flat dict each. columns, cells: the table, whose first column names the row.

    disagreements: where a formula and a count differ, which they must not.
    """

    title: str
    rows: list[Row]
    columns: list[str]
    cells: list[list[str]]
    notes: list[str] = field(default_factory=list)
    disagreements: list[str] = field(default_factory=list)

    def agree(self, what: str, formula: float, count: float) -> None:
        """Notes a disagreement."""
        if formula != count:
            self.disagreements.append(f"{what}: the formula gives {formula:,}, the count {count:,}")


def _plain(number: float) -> str:
    return f"{number:,.2f}".rstrip("0").rstrip(".") if number % 1 else f"{number:,.0f}"


def _figures(number: float) -> str:
    """Two decimals up to 100, one up to 10,000, none above."""
    return f"{number:,.{2 if number < 100 else 1 if number < 10000 else 0}f}"


def _small(number: float) -> str:
    """For parts of a whole, which may be small."""
    return f"{number:.4f}" if number < 100 else _figures(number)


def _count(number: int) -> str:
    """A number of parameters in three figures or more: 16.13B, 41.94M, 262.14k."""
    size, letter = next(((s, x) for s, x in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if number >= s), (1, ""))
    return f"{number / size:,.2f}{letter}" if letter else str(number)


def unit(least: float) -> tuple[float, str]:
    """The unit in which ``least`` is one or more: its size and the letter before it."""
    return next(((size, letter) for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")) if least >= size), (1e3, "k"))


def _pivot(
    title: str, subjects: Sequence[Subject], contexts: Sequence[int], unit: str, value: Callable[[Model, int], float]
) -> Report:
    rows = [{"preset": s.model.name, "context": n, unit: value(s.model, n)} for s in subjects for n in contexts]
    cells = [[s.model.title, *(_figures(value(s.model, n)) for n in contexts)] for s in subjects]
    return Report(title, rows, ["model", *map(spell, contexts)], cells)


def kv(subjects: Sequence[Subject]) -> Report:
    """Cache bytes of each further token, and of a request at any length."""
    models = [s.model for s in subjects]
    if len(models) == 1:
        return _kv_of_one(subjects[0])
    least = models[0].bytes_per_token
    rows = [
        {
            "preset": m.name,
            "bytes_per_token": m.bytes_per_token,
            "ratio": m.bytes_per_token / least,
            "bytes_per_request": m.fixed_bytes,
        }
        for m in models
    ]
    cells = [[m.title, _plain(m.bytes_per_token), f"{m.bytes_per_token / least:.3g}x", f"{m.fixed_bytes:,}"] for m in models]
    report = Report("Cache bytes", rows, ["model", "per token", f"to {models[0].title}", "per request"], cells)
    kept = 2 * models[1].bytes_per_token
    report.notes.append(
        f"on disk: {models[1].title} kept about as many bytes of windows as of rows, {models[0].title} keeps none:"
        f" {_plain(least)} of {_plain(kept)}, 1/{kept / least:.1f}"
    )
    return report


def _kv_of_one(subject: Subject) -> Report:
    model, config = subject.model, subject.config
    report = Report("", [], ["kind", "bytes a row", "rows", "bytes"], [])
    report.title = f"Cache of {model.title}, bytes of each further token, then bytes of each request"
    slope, fixed = {}, {}
    if config is not None:
        report.columns.append("counted")
        step = counted.alignment(config)
        low, high = (counted.counted_cache(config, n * step) for n in (1, 2))
        slope = {kind: (high[kind] - low[kind]) / step for kind in high}
        fixed = {kind: low[kind] for kind in low if kind in model.fixed}
        for kind, size in cache_bytes(model, step).items():
            report.agree(kind if kind in fixed else f"{kind} of {step} tokens", size, low[kind])
            # Of whole tokens, not of each: a row of several tokens has no whole bytes a token.
            if kind not in fixed:
                report.agree(f"{kind} of {2 * step} tokens", cache_bytes(model, 2 * step)[kind], high[kind])

    def line(kind: str, per: str, width: int | None, rows: float | None, size: float, count: float | None) -> None:
        row = {"preset": model.name, "kind": kind, "per": per, "row_bytes": width, "rows": rows, "bytes": size}
        report.rows.append(row | ({"counted_bytes": count} if config else {}))
        cells = ["" if x is None else f"{x:,g}" for x in (width, rows)]
        report.cells.append([kind, *cells, _plain(size), *([_plain(count)] if count is not None else [])])

    for kind, width in sorted({(r.kind, r.bytes) for r in model.rows}, reverse=True):
        kept = [r for r in model.rows if (r.kind, r.bytes) == (kind, width)]
        size = sum(r.bytes_per_token for r in kept)
        line(kind, "token", width, sum(r.layers / r.ratio for r in kept), size, slope.get(kind))
    line("all rows", "token", None, None, model.bytes_per_token, sum(slope.values()) if config else None)
    for kind, size in model.fixed.items():
        line(kind, "request", None, None, size, fixed.get(kind))
    return report


def flops(subjects: Sequence[Subject], contexts: Sequence[int]) -> Report:
    """GFLOPs of one decoded token, each FLOP at the cost of its format beside bfloat16's."""
    total = lambda model, n: sum(decode_flops(model, n).values()) / 1e9  # noqa: E731
    if len(subjects) == 1:
        report = _flops_of_one(subjects[0], contexts)
    else:
        report = _pivot("GFLOPs of a decoded token by context", subjects, contexts, "gflops", total)
    first, last = contexts[0], contexts[-1]
    growth = lambda model: f"x{total(model, last) / total(model, first):.2f}"  # noqa: E731
    for s in subjects if first < last else ():
        said = f"{s.model.title} from {spell(first)} to {spell(last)}: {growth(s.model)}"
        if s.config is not None and s.config.candidate_source_layer_id >= 0:
            without = own_model(replace(s.config, candidate_source_layer_id=-1), "", "")
            said += f", {growth(without)} without the candidate pool"
        report.notes.append(said)
    if len(subjects) > 1 and (least := crossover(subjects[0].model, subjects[1].model, 1 << 20)):
        report.notes.append(f"{subjects[0].model.title} is below {subjects[1].model.title} from {least:,} tokens on")
    return report


def _parts_table(report: Report, per_context: list[dict[str, float]], scale: float) -> None:
    """A line a part and one of their sum, a column a context."""
    for part in dict.fromkeys(part for parts in per_context for part in parts):
        report.cells.append([part, *(_small(parts.get(part, 0) / scale) for parts in per_context)])
    report.cells.append([TOTAL, *(_small(sum(parts.values()) / scale) for parts in per_context)])


def _part_columns(parts: dict[str, float], unit: str, scale: float) -> Row:
    return {f"{unit}.{part}": value / scale for part, value in parts.items()}


def _weighted(model: Model, macs: dict[str, int]) -> float:
    """FLOPs of multiply-adds by part, at the cost of the parts' formats; what is no part counts as bfloat16."""
    costs = steps.formats(model)
    return sum(2 * costs.get(part, 1.0) * n for part, n in macs.items())


def _aligned(config: ModelConfig, context: int) -> int:
    """The next length that a cache can have; raises `UserError` where there is none."""
    step = counted.alignment(config)
    length = -(-context // step) * step
    if length > MOST:
        raise UserError(f"contexts: found {context}, a cache of multiples of {step} tokens, allowed are caches up to {MOST}")
    return length


def _counted(report: Report, subject: Subject, tokens: int, capacity: int, rows: int | None = None) -> dict[str, int]:
    """Multiply-adds of a step of this code as counted, which must be its formula's."""
    config = subject.config
    assert config is not None
    run = steps.as_run(config, subject.model, tokens, capacity, rows)
    count = counted.counted_products(config, tokens, capacity, rows)
    for part in sorted(run.keys() | count.keys()):
        report.agree(f"{part}, multiply-adds of {tokens} tokens at {capacity}", run.get(part, 0), count.get(part, 0))
    return count


def _flops_of_one(subject: Subject, contexts: Sequence[int]) -> Report:
    model, config = subject.model, subject.config
    split = [decode_flops(model, n) for n in contexts]
    scale, letter = unit(sum(split[0].values()))
    report = Report(f"{letter}FLOPs of a decoded token of {model.title}", [], ["part", *map(spell, contexts)], [])
    _parts_table(report, split, scale)
    report.rows = [
        {"preset": model.name, "context": n, "gflops": sum(p.values()) / 1e9} | _part_columns(p, "gflops", 1e9)
        for n, p in zip(contexts, split, strict=True)
    ]
    if config is not None:
        for row, n in zip(report.rows, contexts, strict=True):
            row["counted_gflops"] = _weighted(model, _counted(report, subject, 1, _aligned(config, n))) / 1e9
        report.cells.append(["counted in its jaxpr", *(_small(row["counted_gflops"] * 1e9 / scale) for row in report.rows)])
        report.cells.append(["counted above all", *(f"{r['counted_gflops'] / r['gflops'] - 1:.2%}" for r in report.rows)])
        _compiled(report, config, 1, contexts[-1])
    return report


def prefill(subjects: Sequence[Subject], contexts: Sequence[int]) -> Report:
    """TFLOPs of a prompt; of a model with a decoder half, also as if every token ran every layer."""
    total = lambda model, n: sum(prefill_flops(model, n).values()) / 1e12  # noqa: E731
    whole = lambda model, n: sum(prefill_flops(model, n, every_layer=True).values()) / 1e12  # noqa: E731
    if len(subjects) == 1:
        report = _prefill_of_one(subjects[0], contexts)
    else:
        report = _pivot("TFLOPs of a prompt", subjects, contexts, "tflops", total)
    for s in subjects:
        m = s.model
        said = f"{m.title}: {_count(m.active)} parameters active in decode, {_count(m.active_in_prefill)} in prefill"
        if m.tail is not None:
            n = contexts[-1]
            said += f"; {total(m, n) / whole(m, n):.0%} of the cost of every layer at {spell(n)}"
            if s.config is not None and n > (exact := halo_rows(s.config)):
                share = total(dataclasses.replace(m, tail=exact), n) / whole(m, n)
                said += f", {share:.0%} with the decoder on {exact:,} last tokens, which is exact, in place of {m.tail}"
        report.notes.append(said)
    return report


def _prefill_of_one(subject: Subject, contexts: Sequence[int]) -> Report:
    model, config = subject.model, subject.config
    split = [prefill_flops(model, n) for n in contexts]
    scale, letter = unit(sum(split[0].values()))
    report = Report(f"{letter}FLOPs of a prompt of {model.title}", [], ["part", *map(spell, contexts)], [])
    _parts_table(report, split, scale)
    every = [sum(prefill_flops(model, n, every_layer=True).values()) for n in contexts]
    report.cells.append(["all in every layer", *(_small(e / scale) for e in every)])
    report.rows = [
        {"preset": model.name, "context": n, "tflops": sum(p.values()) / 1e12, "every_layer_tflops": e / 1e12}
        | _part_columns(p, "tflops", 1e12)
        for n, p, e in zip(contexts, split, every, strict=True)
    ]
    if config is None:
        return report
    count: Counter[str] = Counter()
    for row, n in zip(report.rows, contexts, strict=True):
        capacity = _aligned(config, n)
        run, count = steps.prompt_as_run(config, model, n, capacity), Counter()
        for times, tokens, rows in steps.chunks(config, model, n):
            found = _counted(report, subject, tokens, capacity, rows)
            count.update({part: times * macs for part, macs in found.items()})
        row |= {"code_tflops": _weighted(model, run) / 1e12, "counted_tflops": _weighted(model, count) / 1e12}
    for label, key in (("this code's chunks", "code_tflops"), ("counted in jaxprs", "counted_tflops")):
        report.cells.append([label, *(_small(row[key] * 1e12 / scale) for row in report.rows)])
    report.cells.append(["counted above chunks", *(f"{r['counted_tflops'] / r['code_tflops'] - 1:.2%}" for r in report.rows)])
    *_, (_, tokens, rows) = last = steps.chunks(config, model, contexts[-1])
    causes = {"routed experts": "blocks not full", SCORES: "slots not visible yet", CORE: "window blocks"}
    need = steps.prompt_needed(model, contexts[-1])
    above = {cause: _weighted(model, {p: count[p] - need[p]}) for p, cause in causes.items() if count[p] > need[p]}
    why = ", ".join(f"{_small(flops / scale)} {cause}" for cause, flops in above.items())
    report.notes.append(
        f"chunks of {last[0][1]:,} tokens at most, the reference's static shapes: above all at {spell(contexts[-1])} {why}"
    )
    _compiled(report, config, tokens, contexts[-1], rows)
    return report


def _compiled(report: Report, config: ModelConfig, tokens: int, context: int, rows: int | None = None) -> None:
    """XLA's count beside ours, of a model of few enough layers to compile at once; its weights need not exist."""
    if config.num_hidden_layers > 8:
        return
    capacity = _aligned(config, context)
    cost = counted.compiled_cost(config, tokens, capacity, rows)
    macs = sum(counted.counted_products(config, tokens, capacity, rows).values())
    report.notes.append(
        f"compiled step of {tokens:,} at {spell(context)}, each format's FLOP as one: XLA counts"
        f" {cost['flops'] / 1e6:,.2f} MFLOP of all operations, the jaxpr's products are {2 * macs / 1e6:,.2f} MFLOP;"
        f" {cost['kernels']:.0f} kernels,"
        f" {cost['kernels'] / config.num_hidden_layers:.0f} a layer"
    )


def params(subjects: Sequence[Subject]) -> Report:
    """Parameters in all, and those that a token multiplies in decode and in prefill."""
    if len(subjects) == 1:
        return _params_of_one(subjects[0])
    rows, cells = [], []
    for m in (s.model for s in subjects):
        row = {"parameters": m.parameters, "active": m.active, "active_in_prefill": m.active_in_prefill}
        rows.append({"preset": m.name, **row})
        cells.append([m.title, *map(_count, row.values())])
    return Report("Parameters", rows, ["model", "all", "active in decode", "in prefill"], cells)


def _params_of_one(subject: Subject) -> Report:
    model, config = subject.model, subject.config
    columns = ["part", "parameters", *(["counted"] if config is not None else []), "decode", "prefill"]
    report = Report("", [], columns + (["GB"] if config is not None else []), [])
    stored = "; GB as released" if config is not None else ""
    report.title = f"Parameters of {model.title}, and those that a token multiplies in decode and in prefill{stored}"
    counts = counted.counted_weights(config) if config is not None else {}
    for w in model.weights:
        row = {"preset": model.name, "part": w.part, "format": w.format if w.active else None, "parameters": w.size}
        row |= {"active": w.active, "active_in_prefill": w.prefill}
        if config is not None:
            count = counts.get(w.part, counted.Counted())
            row |= {"counted": count.size, "counted_active": count.active, "released_bytes": count.bytes}
            report.agree(w.part, w.size, count.size)
            report.agree(f"{w.part}, active", w.active, count.active)
        report.rows.append(row)
    for part in sorted(counts.keys() - {w.part for w in model.weights}):
        report.agree(part, 0, counts[part].size)
    forms: dict[str, Callable[[int], str]] = {"parameters": "{:,}".format}
    if config is not None:
        forms["counted"] = "{:,}".format
    forms |= {"active": _count, "active_in_prefill": _count}
    if config is not None:
        forms["released_bytes"] = lambda n: f"{n / 1e9:,.3f}"
    for row in report.rows:
        report.cells.append([row["part"], *(form(row[name]) for name, form in forms.items())])
    report.cells.append([TOTAL, *(form(sum(row[name] for row in report.rows)) for name, form in forms.items())])
    return report


def memory(subjects: Sequence[Subject], contexts: Sequence[int]) -> Report:
    """MiB of cache that a request keeps; of one model by kind, with the bytes of its released weights."""
    mib = lambda model, n: sum(cache_bytes(model, n).values()) / 2**20  # noqa: E731
    if len(subjects) > 1:
        return _pivot("Cache of a request, MiB", subjects, contexts, "mib", mib)
    model, config = subjects[0].model, subjects[0].config
    report = Report(f"Cache of a request of {model.title}, MiB", [], ["kind", *map(spell, contexts)], [])
    split = [{kind: float(size) for kind, size in cache_bytes(model, n).items()} for n in contexts]
    _parts_table(report, split, 2**20)
    counts: list[int | None] = [None] * len(contexts)
    if config is not None:
        counts = [sum(counted.counted_cache(config, _aligned(config, n)).values()) for n in contexts]
        report.cells.append(["counted in the cache", *(_small((size or 0) / 2**20) for size in counts)])
        if (step := counted.alignment(config)) > 1 and any(n % step for n in contexts):
            report.notes.append(f"counted at the next multiple of {step} tokens, which a cache's length is")
        weights = counted.counted_weights(config)
        held = sum(one.bytes for one in weights.values())
        tables = weights.get("Engram tables", counted.Counted()).bytes
        report.notes.append(f"weights as released: {held / 1e9:,.2f} GB, of them {tables / 1e9:,.2f} GB Engram tables")
    for n, kinds, count in zip(contexts, split, counts, strict=True):
        row = {"preset": model.name, "context": n, "mib": sum(kinds.values()) / 2**20} | _part_columns(kinds, "mib", 2**20)
        report.rows.append(row | ({"counted_mib": count / 2**20} if count is not None else {}))
        if config is not None and count is not None and n == _aligned(config, n):
            report.agree(f"cache at {n}", sum(cache_bytes(model, n).values()), count)
    return report
