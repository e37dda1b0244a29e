"""Where a training run's weights and momenta lie on a mesh: the report of `dsv41 plan --mesh`."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence

from dsv41.config import ModelConfig
from dsv41.params import ParamSpec, spec_leaves, text_specs
from dsv41.sharding import Cut, Sizes, check_mesh, parse_mesh, placement, shard_bytes, shard_shape, spell
from train.layout import state_leaves
from train.step import init_state

_LAYER = re.compile(r"^layers\.(\d+)\.")


def _spans(numbers: Sequence[int]) -> str:
    """``0-1,3`` of ascending numbers."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and spans[-1][1] == n - 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _say(cut: Cut) -> str:
    return "(" + ", ".join("*".join(axes) or "-" for axes in cut) + ")"


def placed(config: ModelConfig, sizes: Sizes) -> list[dict]:
    """Each weight's name, shape, cut, one device's part and its bytes; those alike in several layers in one row, as layers.*."""
    rows: dict[tuple, list[int]] = defaultdict(list)
    for spec in spec_leaves(text_specs(config)):
        layer = _LAYER.match(spec.key)
        rows[(_LAYER.sub("layers.*.", spec.key), spec.shape, placement(spec, sizes), spec)].append(int(layer[1]) if layer else -1)
    merged: dict[tuple, list[int]] = defaultdict(list)
    for (name, shape, cut, spec), layers in rows.items():
        merged[(name, shape, cut, shard_shape(spec, sizes, cut))] += layers
    return [
        {
            "name": name,
            "layers": _spans(layers) if layers != [-1] else "",
            "shape": shape,
            "cut": _say(cut),
            "part": part,
            "bytes": 4 * math.prod(part),
        }
        for (name, shape, cut, part), layers in merged.items()
    ]


def totals(config: ModelConfig, sizes: Sizes) -> dict[str, int]:
    """One device's bytes of weights, of the whole state, and of the largest weight that every device has a copy of."""
    specs = text_specs(config)
    copied: list[ParamSpec] = [spec for spec in spec_leaves(specs) if not any(placement(spec, sizes))]
    return {
        "devices": math.prod(sizes.values()),
        "weights": shard_bytes(specs, sizes),
        "state": shard_bytes(state_leaves(init_state, config), sizes),
        "largest_copied": max((4 * spec.size for spec in copied), default=0),
    }


def plan_mesh(config: ModelConfig, mesh: str, as_json: bool = False) -> str:
    """The report; raises `UserError` for a mesh that the model cannot be on."""
    sizes = parse_mesh(mesh)
    check_mesh(config, sizes)
    rows, sums = placed(config, sizes), totals(config, sizes)
    if as_json:
        return json.dumps({"mesh": spell(sizes), "weights": rows, "totals": sums}, indent=1)
    lines = [f"mesh {spell(sizes)}: {sums['devices']} devices; a weight's shape, what cuts it, one device's part and bytes"]
    for row in rows:
        shape, part = ("x".join(map(str, row[name])) for name in ("shape", "part"))
        layers = f" [{row['layers']}]" if row["layers"] else ""
        lines.append(f"{row['name']}{layers}  {shape}  {row['cut']}  {part}  {row['bytes']:,}")
    lines.append(f"weights: {sums['weights']:,} bytes a device; with momenta: {sums['state']:,}")
    lines.append(f"largest weight that every device has a copy of: {sums['largest_copied']:,} bytes")
    return "\n".join(lines)
