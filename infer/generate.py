"""Text from a trained run's folder: prompts in, continuations out, by one compiled forward of fixed length."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from dsv41.config import ModelConfig, load_config
from dsv41.errors import UserError
from dsv41.model import forward
from dsv41.numerics import Policy
from dsv41.params import abstract_params, text_specs
from dsv41.tokenmap import token_map
from infer.sampling import sample
from train.checkpoint import Checkpoints
from train.tokenizer import BOS_ID, EOS_ID, PAD_ID, foreign_tokenizer, tokenizer_from_json


@dataclass(frozen=True)
class Generation:
    """New token ids and their text; ``finish``: the model ended its text, enough tokens, or the buffer is full."""

    ids: list[int]
    text: str
    finish: Literal["eos", "max_tokens", "length"]


@dataclass(frozen=True)
class Model:
    """A restored run: weights, config, tokenizer and its folding map."""

    params: Any
    config: ModelConfig
    tokenizer: Tokenizer
    token_map: np.ndarray
    step: int


def load_model(run: Path) -> Model:
    """The newest checkpoint in the folder of a run, weights only; raises `UserError` when there is none."""
    checkpoint_folder = run / "checkpoints"
    latest = Checkpoints(checkpoint_folder, 1).latest() if checkpoint_folder.is_dir() else None
    if latest is None:
        raise UserError(f"checkpoint: found no checkpoint in {str(run)!r}, allowed is a folder that dsv41 train wrote")
    config = load_config(run)
    file = run / "tokenizer.json"
    try:
        # A folder that dsv41 convert made has no run.json, and the tokenizer of its source.
        read = tokenizer_from_json if (run / "run.json").exists() else foreign_tokenizer
        tokenizer = read(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"checkpoint: cannot read {str(file)!r} ({error.strerror})") from error
    fold, _ = token_map(tokenizer, config.engram_compressed_vocab_size)
    params = _restore(checkpoint_folder, latest, config)
    return Model(params, config, tokenizer, fold, latest)


def _restore(folder: Path, step: int, config: ModelConfig) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), abstract_params(text_specs(config))
    )
    return Checkpoints(folder, 1).restore_params(step, abstract)


class Generator:
    """Continues prompts within a buffer of ``length`` tokens."""

    def __init__(self, model: Model, length: int = 256, policy: Policy | None = None):
        align = model.config.document_alignment
        if length < 2 or length % align:
            near = max(round(length / align), 1) * align
            raise UserError(f"length: found {length}, allowed is a multiple of {align}; nearest is {near}")
        self.model, self.length = model, length
        config, fold = model.config, jnp.asarray(model.token_map, jnp.int32)
        policy = policy or Policy()

        def step(params: Any, buffer: jax.Array, count: jax.Array, key: jax.Array, temperature: jax.Array) -> jax.Array:
            segments = (jnp.arange(length, dtype=jnp.int32) < count).astype(jnp.int32)[None]
            logits = forward(params, config, policy, buffer, segments, fold).logits
            last = jax.lax.dynamic_index_in_dim(logits[0], count - 1, 0, keepdims=False)
            return sample(last, key, count, temperature)

        self._step: Callable[..., jax.Array] = jax.jit(step)

    def check_ids(self, ids: list[int]) -> None:
        """Raises `UserError` for token ids that cannot be continued."""
        if not ids:
            raise UserError("prompt: found nothing, allowed is text of at least one token")
        if len(ids) + 1 >= self.length:
            raise UserError(f"prompt: found {len(ids)} tokens, allowed is at most {self.length - 2} in a buffer of {self.length}")
        vocab = self.model.config.vocab_size
        for n in ids:
            if not 0 <= n < vocab:
                raise UserError(f"prompt: found token id {n}, allowed is 0 to {vocab - 1}")

    def continue_ids(self, ids: list[int], max_new_tokens: int, temperature: float = 0.0, seed: int = 0) -> Generation:
        """Continues ``ids`` (without BOS) by at most ``max_new_tokens``; greedy at temperature 0."""
        self.check_ids(ids)
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens: found {max_new_tokens}, allowed is 1 or more; nearest is 1")
        if not 0 <= temperature < float("inf"):
            raise UserError(f"temperature: found {temperature}, allowed is a finite number from 0; nearest is 0")
        if not 0 <= seed < 2**32:
            raise UserError(f"seed: found {seed}, allowed is 0 to {2**32 - 1}")
        buffer = np.full((1, self.length), PAD_ID, np.int32)
        buffer[0, : len(ids) + 1] = [BOS_ID, *ids]
        count, key = len(ids) + 1, jax.random.key(seed)
        new: list[int] = []
        finish: Literal["eos", "max_tokens", "length"] = "max_tokens"
        while len(new) < max_new_tokens:
            if count == self.length:
                finish = "length"
                break
            token = int(self._step(self.model.params, jnp.asarray(buffer), jnp.int32(count), key, jnp.float32(temperature)))
            if token == EOS_ID:
                finish = "eos"
                break
            buffer[0, count] = token
            new.append(token)
            count += 1
        return Generation(new, self.model.tokenizer.decode(new), finish)

    def continue_text(self, prompt: str, max_new_tokens: int, temperature: float = 0.0, seed: int = 0) -> Generation:
        """Continues a text."""
        ids = self.model.tokenizer.encode(prompt, add_special_tokens=False).ids
        return self.continue_ids(ids, max_new_tokens, temperature, seed)
