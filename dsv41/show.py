"""Tables for people: on a terminal aligned, at any width with every character of a name, elsewhere a line a row."""

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

Row = tuple[Sequence[str], str | None]  # cells, and a style for the row

_PLAN = {
    "layer": "layer",
    "half": "half",
    "ratio": "ratio",
    "mode": "mode",
    "kv": "kv_source",
    "index": "index_source",
    "pool": "pool",
    "engram": "engram",
    "routing": "routing",
}


def print_table(columns: Sequence[str], rows: Iterable[Row], title: str | None = None, right: Sequence[str] = ()) -> None:
    """Prints rows under bold headers; cells that the terminal has no room for go on in further lines, none is cut.

    right: the columns whose cells stand at their right edge.
    """
    console, rows = Console(markup=False, highlight=False), list(rows)
    view = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    for n, column in enumerate(columns):
        # The first column names the row: others wrap before it does.
        whole = n == 0 and max((len(cells[0]) for cells, _ in rows), default=0) <= console.width * 2 // 3
        view.add_column(column, overflow="fold", justify="right" if column in right else "left", no_wrap=whole)
    for cells, style in rows:
        view.add_row(*cells, style=style)
    if title:
        console.print(f"\n{title}", style="bold")
    console.print(view)


def show_plan(table: dict) -> None:
    """The layers of `plan_table`, a closing line, and what the optimizer of each family keeps."""
    layers, totals = table["layers"], table["totals"]
    rows = [
        {
            **{name: "-" if layer[key] is None else str(layer[key]) for name, key in _PLAN.items()},
            "bytes/token": f"{layer['cache_bytes_per_token']:g}",
            "parameters": f"{layer['parameters']:,}",
        }
        for layer in layers
    ]
    modes = ", ".join(f"{totals[mode]} {mode}" for mode in ("swa", "full", "reindex", "reuse"))
    closing = (
        f"{totals['layers']} layers ({modes}, {totals['engram']} engram), {totals['parameters']:,} parameters,"
        f" {totals['cache_bytes_per_token']:g} cache bytes per token, {totals['cache_bytes_window']:,} in windows"
    )
    if sys.stdout.isatty():
        routings = {row["routing"] for row in rows}
        # Eighty characters hold the release's table without the column that says the same in every row.
        columns = [name for name in rows[0] if name != "routing" or len(routings) > 1]
        headers = {"bytes/token": "bytes/\ntoken"}
        print_table(
            [headers.get(name, name) for name in columns],
            [([row[name] for name in columns], None) for row in rows],
            right=("bytes/\ntoken", "parameters"),
        )
        if "routing" not in columns:
            closing = f"{closing}; routing by {routings.pop()} in all"
    else:
        for row in rows:
            print(" ".join(f"{name}={value}" for name, value in row.items()))
    print(closing)
    families = {name: row["state_bytes"] for name, row in table["optimizer"].items() if row["state_bytes"]}
    said = ", ".join(f"{name} {size:,}" for name, size in sorted(families.items()) if name != "schedule")
    print(f"optimizer state in training: {sum(families.values()):,} bytes ({said})")
