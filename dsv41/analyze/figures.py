"""The pictures of `dsv41 analyze`, in one style for light and for dark pages."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from dsv41.analyze.contexts import spell
from dsv41.analyze.costs import Model, cache_bytes, crossover, decode_flops, prefill_flops
from dsv41.analyze.report import unit
from dsv41.errors import UserError
from dsv41.files import replacing

Theme = Literal["light", "dark"]
_SUFFIXES = (".png", ".svg", ".pdf")
_INK = {"light": ("#1f2328", "#ffffff", "#d0d7de"), "dark": ("#e6edf3", "#0d1117", "#30363d")}  # text, ground, grid
# Told apart by readers who are colour-blind, and in grey; of two lightnesses for the two grounds.
_COLORS = {
    "light": ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#b8860b", "#5a5a5a", "#2f8fd8", "#882255"),
    "dark": ("#56b4e9", "#ff9e4a", "#2fc49a", "#e08bd0", "#f0e442", "#b0b0b0", "#9ad0f5", "#ff8fa3"),
}
# Parts that a picture shows together.
_GROUPS = {
    "attention projections": "attention projections",
    "routed experts": "experts",
    "shared experts": "experts",
    "dense MLPs": "experts",
    "attention core": "attention core",
    "index scores": "index scores",
    "tail": "tail: last window in the decoder",
}
_REST = "the rest"
_GROUP_COLORS = dict(zip((*dict.fromkeys(_GROUPS.values()), _REST), (0, 1, 2, 3, 6, 5), strict=True))
_TOKENS = "tokens; k = 1024, m = 1024 k"


def check_plot(file: Path) -> None:
    """Raises `UserError` for a picture of another format."""
    if file.suffix.lower() not in _SUFFIXES:
        raise UserError(f"plot: found {file.name!r}, allowed is a name that ends in {', '.join(_SUFFIXES)}")


@contextlib.contextmanager
def axes_of(theme: Theme) -> Iterator[Any]:
    """The axes of a new figure, which is drawn in the pictures' style meanwhile."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.rcsetup import cycler

    text, ground, grid = _INK[theme]
    style = {
        "axes.edgecolor": grid,
        "axes.facecolor": ground,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.labelcolor": text,
        "axes.prop_cycle": cycler(color=_COLORS[theme]),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "figure.facecolor": ground,
        "font.size": 10.0,
        "grid.color": grid,
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "lines.linewidth": 2.0,
        "lines.markersize": 4.5,
        "savefig.facecolor": ground,
        "svg.hashsalt": "dsv41",  # the same picture, the same file
        "text.color": text,
        "xtick.color": text,
        "ytick.color": text,
    }
    with pyplot.rc_context({**style}):
        yield pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")[1]


def draw(what: str, models: Sequence[Model], contexts: Sequence[int], theme: Theme) -> Any:
    """The figure of a report: lines or bars of several models side by side, or the parts of one."""
    with axes_of(theme) as axes:
        _DRAW[what, len(models) == 1](axes, models, contexts)
    return axes.figure


def plot(what: str, models: Sequence[Model], contexts: Sequence[int], theme: Theme, file: Path) -> None:
    """Writes `draw`'s figure."""
    save(draw(what, models, contexts, theme), file)


def save(figure: Any, file: Path) -> None:
    """Writes a figure by a temporary name and closes it."""
    from matplotlib import pyplot

    kind = file.suffix.lower()[1:]
    try:
        # Without a date, which would make each file another.
        metadata = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
        with replacing(file) as partial, pyplot.rc_context({"svg.hashsalt": "dsv41"}):
            figure.savefig(partial, format=kind, dpi=130, metadata=metadata)
    finally:
        pyplot.close(figure)


def _lines(axes: Any, models: Sequence[Model], contexts: Sequence[int], value: Any, label: str, unit: str) -> None:
    """A line a model over contexts, its last value at its end."""
    from matplotlib.ticker import LogLocator

    for model, marker in zip(models, "osD^vP*X" * len(models), strict=False):
        values = [value(model, n) for n in contexts]
        (line,) = axes.plot(contexts, values, marker=marker, label=model.title)
        said = f"{model.title}\n{values[-1]:,.3g} {unit}" if values[-1] < 1000 else f"{model.title}\n{values[-1]:,.0f} {unit}"
        axes.annotate(
            said, (contexts[-1], values[-1]), (8, 0), textcoords="offset points", va="center", color=line.get_color(), fontsize=9
        )
    context_axis(axes, contexts)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.3g}" if y < 1000 else f"{y:,.0f}")
    axes.set_ylabel(label)


def context_axis(axes: Any, contexts: Sequence[int]) -> None:
    """The contexts as the x axis, by doublings."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [spell(n) for n in contexts])
    axes.minorticks_off()
    axes.set_xlabel(f"context ({_TOKENS})")


def _stack(axes: Any, contexts: Sequence[int], per_context: Sequence[dict[str, float]], label: str) -> None:
    """A bar a context, its parts on one another in `_GROUPS`."""
    groups = {name: [0.0] * len(contexts) for name in _GROUP_COLORS}
    for n, parts in enumerate(per_context):
        for part, value in parts.items():
            groups[_GROUPS.get(part, _REST)][n] += value
    bottom = [0.0] * len(contexts)
    for name, values in groups.items():
        if any(values):
            axes.bar(range(len(contexts)), values, bottom=bottom, width=0.65, label=name, color=f"C{_GROUP_COLORS[name]}")
            bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    axes.set_xticks(range(len(contexts)), [spell(n) for n in contexts])
    axes.grid(False, axis="x")
    axes.set_xlabel(f"context ({_TOKENS})")
    axes.set_ylabel(label)


def legend_above(axes: Any, title: str) -> None:
    """The legend between the title and the axes, over which it would hide lines."""
    axes.figure.suptitle(title, x=0.01, ha="left")
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles, names, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=9)


def _dots(
    axes: Any, names: Sequence[str], values: Sequence[float], labels: Sequence[str], label: str, say: Callable[[float], str]
) -> None:
    """A dot a name on a log scale, whose start says nothing as a bar's would, each with its number."""
    places = range(len(names))
    axes.scatter(values, places, s=70, color=[f"C{n if len(names) <= 4 else 0}" for n in places])
    for place, value, said in zip(places, values, labels, strict=True):
        axes.annotate(said, (value, place), (9, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(places, names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.set_xlim(min(values) / 4, max(values) * 12)
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda x, _: say(x))
    axes.set_xlabel(label)


def _size(size: float) -> str:
    for name in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or name == "GiB":
            return f"{size:,.4g} {name}"
        size /= 1024
    return ""


def _kv(axes: Any, models: Sequence[Model], contexts: Sequence[int]) -> None:
    values = [m.bytes_per_token for m in models]
    labels = [f"{v:,.6g}" + (f"  ({v / values[0]:.3g}x)" if n else "") for n, v in enumerate(values)]
    _dots(axes, [m.title for m in models], values, labels, "cache bytes of each further token (log scale)", "{:,.0f}".format)
    axes.set_title("Cache bytes by model")


def _kv_of_one(axes: Any, models: Sequence[Model], contexts: Sequence[int]) -> None:
    kinds: dict[str, float] = {}
    for r in models[0].rows:
        kinds[r.kind] = kinds.get(r.kind, 0) + r.bytes_per_token
    labels = [f"{v:,.6g}" for v in kinds.values()]
    _dots(axes, list(kinds), list(kinds.values()), labels, "cache bytes of each further token (log scale)", "{:,.0f}".format)
    axes.set_title(f"Cache bytes of {models[0].title}")


def _flops(axes: Any, models: Sequence[Model], contexts: Sequence[int]) -> None:
    value = lambda m, n: sum(decode_flops(m, n).values()) / 1e9  # noqa: E731
    _lines(axes, models, contexts, value, "GFLOPs of a decoded token (log scale)", "GFLOPs")
    least = crossover(models[0], models[1], 1 << 20)
    if least and contexts[0] < least < contexts[-1]:
        axes.axvline(least, color=axes.xaxis.label.get_color(), linewidth=1, linestyle=":")
        said = f"{models[0].title} is below\n{models[1].title} from {least:,}"
        axes.annotate(said, (least, 1), (-6, -4), ("data", "axes fraction"), "offset points", ha="right", va="top", fontsize=9)
    axes.set_title("Decode by context")


def _flops_of_one(axes: Any, models: Sequence[Model], contexts: Sequence[int]) -> None:
    found = [decode_flops(models[0], n) for n in contexts]
    size, letter = unit(sum(found[0].values()))
    _stack(axes, contexts, [{part: v / size for part, v in p.items()} for p in found], f"{letter}FLOPs of a decoded token")
    legend_above(axes, f"Decode of {models[0].title} by part")


def _prefill(axes: Any, models: Sequence[Model], contexts: Sequence[int]) -> None:
    value = lambda m, n: sum(prefill_flops(m, n).values()) / n / 1e9  # noqa: E731
    _lines(axes, models, contexts, value, "GFLOPs of each token of a prompt (log scale)", "GFLOPs")
    axes.set_xlabel(f"prompt ({_TOKENS})")
    axes.set_title("Prefill by length of the prompt")


def _prefill_of_one(axes: Any, models: Sequence[Model], contexts: Sequence[int]) -> None:
    model = models[0]
    found = [{part: v / n for part, v in prefill_flops(model, n).items()} for n in contexts]
    size, letter = unit(sum(found[0].values()))
    parts = [{part: v / size for part, v in p.items()} for p in found]
    _stack(axes, contexts, parts, f"{letter}FLOPs of each token of a prompt")
    if model.tail is not None:
        every = [sum(prefill_flops(model, n, every_layer=True).values()) / n / size for n in contexts]
        axes.plot(
            range(len(contexts)),
            every,
            "o--",
            color=axes.xaxis.label.get_color(),
            linewidth=1.2,
            label="every layer for every token",
        )
    axes.set_xlabel(f"prompt ({_TOKENS})")
    legend_above(axes, f"Prefill of {model.title} by part")


def _params(axes: Any, models: Sequence[Model], contexts: Sequence[int]) -> None:
    kinds = {"all": "parameters", "active in decode": "active", "active in prefill": "active_in_prefill"}
    for n, (label, name) in enumerate(kinds.items()):
        values = [getattr(m, name) / 1e9 for m in models]
        bars = axes.bar([i + (n - 1) * 0.27 for i in range(len(models))], values, width=0.25, label=label)
        axes.bar_label(bars, [f"{v:,.3g}" for v in values], fontsize=8, padding=2, color=axes.xaxis.label.get_color())
    axes.set_xticks(range(len(models)), [m.title for m in models])
    axes.set_yscale("log")
    axes.grid(False, axis="x")
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.3g}")
    axes.set_xlabel("model")
    axes.set_ylabel("parameters (billions, log scale)")
    legend_above(axes, "Parameters")


def _params_of_one(axes: Any, models: Sequence[Model], contexts: Sequence[int]) -> None:
    weights = sorted(models[0].weights, key=lambda w: -w.size)
    labels = [f"{w.size:,}" for w in weights]
    _dots(axes, [w.part for w in weights], [w.size for w in weights], labels, "parameters (log scale)", "{:,.0f}".format)
    axes.set_title(f"Parameters of {models[0].title}")


def _memory(axes: Any, models: Sequence[Model], contexts: Sequence[int]) -> None:
    value = lambda m, n: sum(cache_bytes(m, n).values()) / 2**30  # noqa: E731
    _lines(axes, models, contexts, value, "cache of a request (GiB, log scale)", "GiB")
    axes.set_title("Cache of a request by context")


def _memory_of_one(axes: Any, models: Sequence[Model], contexts: Sequence[int]) -> None:
    from matplotlib.ticker import LogLocator

    kinds = {kind: size for kind, size in cache_bytes(models[0], contexts[-1]).items() if size}
    labels = [_size(size) for size in kinds.values()]
    _dots(axes, list(kinds), list(kinds.values()), labels, "bytes (log scale)", _size)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, subs=(1,), numticks=9))
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda x, _: _size(x))
    total = sum(kinds.values())
    axes.set_title(f"Cache of a request of {models[0].title} at {spell(contexts[-1])} tokens: {_size(total)}")


_DRAW = {
    ("kv", False): _kv,
    ("kv", True): _kv_of_one,
    ("flops", False): _flops,
    ("flops", True): _flops_of_one,
    ("prefill", False): _prefill,
    ("prefill", True): _prefill_of_one,
    ("params", False): _params,
    ("params", True): _params_of_one,
    ("memory", False): _memory,
    ("memory", True): _memory_of_one,
}
