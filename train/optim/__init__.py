"""Optimizers: Muon, Sinkhorn-balanced and AdamW, each over its own weights."""

from train.optim.partition import (
    OptimizerState,
    apply_updates,
    clip,
    floats,
    make_optimizer,
    measure,
    optimizer_report,
    update_biases,
)
from train.optim.schedule import warmup_hold_cosine
from train.optim.sinkhorn import Rows

__all__ = [
    "OptimizerState",
    "Rows",
    "apply_updates",
    "clip",
    "floats",
    "make_optimizer",
    "measure",
    "optimizer_report",
    "update_biases",
    "warmup_hold_cosine",
]
