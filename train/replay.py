"""Batches that train for decoder replay: where each document's prompt ends, and what the decoder sees of it (training §6.2)."""

from dataclasses import replace

import numpy as np

from train.data import Batch


def replayed(batch: Batch, window: int, half: bool, rng: np.random.Generator) -> Batch:
    """``batch`` with a prompt drawn for each document; its loss is on the tokens behind it alone.

    half: leave out of the decoder at least half of each document, so that the tokens it runs on (``chosen``) are half as
    many; a document too short for that has no loss.
    """
    rows, time = batch.ids.shape
    weights, starts = np.zeros_like(batch.weights), np.zeros((rows, time), np.int32)
    chosen = np.full((rows, time // 2), time, np.int32)
    for row in range(rows):
        used = 0
        for segment in range(1, int(batch.segments[row].max(initial=0)) + 1):
            at = np.flatnonzero(batch.segments[row] == segment)
            count = len(at)
            least = -(-count // 2) + window if half else 1
            if least >= count:
                starts[row, at] = count
                continue
            prompt = int(rng.integers(least, count))
            start = max(0, prompt - window)
            starts[row, at] = start
            # The prompt's last token predicts the first behind it.
            weights[row, at[prompt - 1 :]] = batch.weights[row, at[prompt - 1 :]]
            if half:
                chosen[row, used : used + count - start] = at[start:]
                used += count - start
    return replace(batch, weights=weights, replay=starts, chosen=chosen if half else None)
