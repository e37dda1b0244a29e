"""What generation costs on this machine: prefill and decode through the cache, and the plain path beside them."""

import time
from statistics import median
from typing import Any

import numpy as np

from infer.generate import Generator
from infer.model import Model
from infer.plain import PlainGenerator
from infer.sampling import Sampling

CONTEXT = 256


def measure(model: Model, batches: tuple[int, ...] = (1, 16), new_tokens: int = 64, repeats: int = 5) -> dict[str, Any]:
    """Tokens a second of all rows in prefill and decode, from a prompt of random ids to a context of 256; medians, no compiling.

    ``plain_decode``: the plain path, one forward pass over a buffer of 256 tokens for each new one.
    """
    rng = np.random.default_rng(0)
    generator, low = Generator(model), 3
    found: dict[str, Any] = {"context": CONTEXT, "prompt": CONTEXT - new_tokens}
    sampling = Sampling(max_new_tokens=new_tokens)
    generator.ends = set()  # a random context must not end early
    for batch in batches:
        prompts = rng.integers(low, model.config.vocab_size, (batch, CONTEXT - new_tokens)).tolist()
        speeds = [generator.generate(prompts, [sampling] * batch)[1] for _ in range(repeats)]
        found[f"prefill_batch_{batch}"] = median(s.prompt_tokens / s.prefill_seconds for s in speeds)
        found[f"decode_batch_{batch}"] = median(s.new_tokens / s.decode_seconds for s in speeds)
        found[f"cache_bytes_batch_{batch}"] = speeds[0].cache_bytes
    plain = PlainGenerator(model, CONTEXT)
    prompt = rng.integers(low, model.config.vocab_size, CONTEXT - 4).tolist()
    plain.continue_ids(prompt, Sampling(max_new_tokens=1))
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        made = len(plain.continue_ids(prompt, Sampling(max_new_tokens=4)))
        seconds.append((time.perf_counter() - began) / max(made, 1))
    found["plain_decode"] = 1 / median(seconds)
    return found


__all__ = ["CONTEXT", "measure"]
