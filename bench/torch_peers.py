"""The torch peer of `grouped_matmul` on bfloat16 weights: for an interpreter that has torch beside this project's packages.

    python -m bench.torch_peers '{"rows": 16384, "groups": 64, "depth": 4096, "width": 2048, "sizes": "random"}'

The case's fields as JSON (`kernels_pallas.grouped_matmul.cases.Case`); one line of JSON comes back. Times as in
`bench.torch_attention`: launch gaps count.
"""

import importlib
import json
import sys
from typing import Any

from bench.torch_attention import measure
from kernels_pallas.grouped_matmul.cases import Case, group_sizes


def run(case: Case) -> list[dict]:
    """Times of `torch._grouped_mm` on one case, with ``backward`` of its gradients too, each by itself."""
    torch: Any = importlib.import_module("torch")  # not among this project's packages

    torch.manual_seed(0)
    draw = {"device": "cuda", "dtype": torch.bfloat16}
    ends = torch.tensor(group_sizes(case), device="cuda").cumsum(0).to(torch.int32)
    x, g = (torch.randn(case.rows, size, **draw) for size in (case.depth, case.width))
    weight = torch.empty(case.groups, case.width, case.depth, **draw)
    for own in weight:  # the whole at once would take as much again in float32
        own.normal_()
    calls = {"torch._grouped_mm": lambda: torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)}
    if case.backward:
        calls["torch._grouped_mm, rows' gradient"] = lambda: torch._grouped_mm(g, weight, offs=ends)
        calls["torch._grouped_mm, weights' gradient"] = lambda: torch._grouped_mm(g.t(), x, offs=ends)
    found = []
    for name, call in calls.items():
        median, low, high = measure(torch, call)
        found.append({"name": name, "torch": torch.__version__, "median": median, "low": low, "high": high})
    return found


if __name__ == "__main__":
    print(json.dumps(run(Case(**json.loads(sys.argv[1])))))
