"""The torch peer of `sparse_attention` on float rows: a process of its own, for the interpreter that has torch.

    python bench/torch_attention.py '{"queries": 4096, "heads": 64, ...}'

The case's fields as JSON (`kernels_pallas.sparse_attention.cases.Case`); one line of JSON comes back. Times are of CUDA events
around a compiled call, so that launch gaps count, with a buffer larger than the L2 written before each.
"""

import importlib
import json
import statistics
import sys
from typing import Any

REPEATS = 9
FLUSH_BYTES = 256 << 20


def attend(torch: Any, q: Any, entries: Any, entry_ids: Any, window: Any, window_ids: Any, sink: Any) -> Any:
    """The op's output, as its reference computes it, with bfloat16 operands of both products."""
    rows = torch.cat([entries[entry_ids.clamp(min=0)], window[window_ids.clamp(min=0)]], dim=1)
    named = torch.cat([entry_ids, window_ids], dim=1)[:, None] >= 0
    scores = (q @ rows.transpose(1, 2)).float() * q.shape[-1] ** -0.5
    scores = torch.cat([scores.masked_fill(~named, -1e30), sink[None, :, None].expand(q.shape[0], -1, 1)], dim=2)
    return scores.softmax(dim=2)[..., :-1].to(q.dtype) @ rows


def measure(torch: Any, call: Any) -> tuple[float, float, float]:
    """Median, least and most microseconds of ``call``."""
    buffer = torch.zeros(FLUSH_BYTES // 4, device="cuda")
    spans = []
    for _ in range(2):
        call()
    for _ in range(REPEATS):
        buffer += 1
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        spans.append(1e3 * begin.elapsed_time(end))
    return statistics.median(spans), min(spans), max(spans)


def run(case: dict) -> dict:
    """Times of one case: its gradients too where it asks for them."""
    torch: Any = importlib.import_module("torch")  # not among this project's packages

    torch.manual_seed(0)
    size = {name: int(case[name]) for name in "queries heads width topk window slots rows".split()}

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    def ids(count: int, of: int) -> Any:
        start = torch.randint(of, (size["queries"], 1), device="cuda")
        return (start + 7919 * torch.arange(count, device="cuda")) % of

    q, entries, window = (
        draw(size["queries"], size["heads"], size["width"]),
        draw(size["slots"], size["width"]),
        draw(size["rows"], size["width"]),
    )
    args = q, entries, ids(size["topk"], size["slots"]), window, ids(size["window"], size["rows"]), draw(size["heads"]).float()
    leaves = q, entries, window, args[-1]
    compiled = torch.compile(lambda *args: attend(torch, *args))
    if case.get("backward"):
        for leaf in leaves:
            leaf.requires_grad_()
        cotangent = q.detach().clone()

        def call() -> Any:
            return torch.autograd.grad(compiled(*args), leaves, cotangent)
    else:

        def call() -> Any:
            return compiled(*args)

    median, low, high = measure(torch, call)
    return {"name": "torch.compile", "torch": torch.__version__, "median": median, "low": low, "high": high}


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
