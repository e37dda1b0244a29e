"""For people: tables, on a terminal aligned at any width with every character of a name, elsewhere a line a row; safe text."""

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from dsv41.errors import escaped

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

    right: the columns whose cells stand at their right edge, numbers that no line breaks into; where they have no room side
    by side, every cell has a line of its own.
    """
    console, rows = _Console(markup=False, highlight=False), list(rows)
    if console.width < 1:
        console.width = 80
    if title:
        console.print(f"\n{title}", style="bold")
    if _narrowest(columns, rows, right) > console.width:
        for cells, style in rows:
            console.print(cells[0], style=style or "bold")
            for column, cell in zip(columns[1:], cells[1:], strict=True):
                console.print(f"  {' '.join(column.split())}: {cell}", soft_wrap=True)
        return
    view = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    # The first column names the row: others wrap before it does.
    named = max((len(cells[0]) for cells, _ in rows), default=0) <= console.width * 2 // 3
    whole = {*right, *columns[:1]} if named and _narrowest(columns, rows, (*right, *columns[:1])) <= console.width else {*right}
    for column in columns:
        view.add_column(column, overflow="fold", justify="right" if column in right else "left", no_wrap=column in whole)
    for cells, style in rows:
        view.add_row(*cells, style=style)
    console.print(view)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # the command line ends it with 0; rich would with 1


def _narrowest(columns: Sequence[str], rows: Sequence[Row], right: Sequence[str]) -> int:
    """The least width of a table: its numbers whole, other columns at most 8 wide."""
    width = 0
    for n, column in enumerate(columns):
        lines = [line for text in (column, *(cells[n] for cells, _ in rows)) for line in text.split("\n")]
        longest = max(map(len, lines))
        width += 1 + (longest if column in right else min(longest, 8))
    return width - 1


def printable(text: str) -> str:
    """``text``, on a terminal with its controls `escaped`: a model's text must not drive it."""
    return escaped(text) if sys.stdout.isatty() else text


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
