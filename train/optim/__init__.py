"""Optimizers: Muon, Sinkhorn-balanced and AdamW, each over its own weights."""

from train.optim.partition import OptimizerState, clip, make_optimizer, optimizer_report, update_biases
from train.optim.schedule import warmup_hold_cosine

__all__ = ["OptimizerState", "clip", "make_optimizer", "optimizer_report", "update_biases", "warmup_hold_cosine"]
