"""`dsv41 eval`: a run's bits per byte, what it recalls at which depth of which length, and what its selections catch."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv41.commands import Eval
from dsv41.config import ModelConfig
from dsv41.config import replace as configure
from dsv41.errors import UserError, nearest
from dsv41.files import to_json
from dsv41.model import features
from dsv41.numerics import PACKED, Policy
from dsv41.show import print_table
from infer.model import Model, load_model
from train.corpus import load_corpus, split_corpus
from train.data import Batch, check_stream
from train.diagnose import make_diagnose
from train.losses import head_logits
from train.options import MOST, check_batch, memory, tree_bytes
from train.packing import Packed, check_length, pack
from train.run import own_data
from train.stage import score
from train.step import TrainState, make_eval_step
from train.synthetic import TASKS, least_length, make_row, task_accuracy, to_task_batch
from train.tokenizer import encode_documents, token_bytes

_DIAGNOSED_TOKENS = 4096


def _check(options: Eval, model: Model) -> None:
    """Raises `UserError` for options that cannot be used, or not on this machine."""
    for name in ("batch_size", "rows"):
        if not 1 <= (value := getattr(options, name)) <= MOST:
            raise UserError(f"{name}: found {value}, allowed is 1 to {MOST}; nearest is {min(max(value, 1), MOST)}")
    check_stream(options.batch_size, options.seed)
    for depth in options.depths:
        if not 0 <= depth <= 1:
            raise UserError(f"depths: found {depth}, allowed is 0 to 1")
    for task in options.tasks:
        if task not in TASKS:
            raise UserError(f"tasks: found {task!r}, allowed are {', '.join(TASKS)}{nearest(task, TASKS)}")
    # The shortest row of each, for what a task asks of the vocabulary.
    for task in options.tasks:
        make_row(task, None, least_length(task), model.config.vocab_size, 0.0, np.random.default_rng(0))
    least, why = max(map(least_length, options.tasks), default=3), f"for tasks {' '.join(options.tasks)}"
    check_length(options.length, model.config.document_alignment, *(() if options.lengths or not options.tasks else (least, why)))
    for length in options.lengths:
        check_length(length, 1, least, why, "lengths")
    for name, lengths in (("length", (options.length,)), ("lengths", options.lengths)):
        for length in lengths:
            check_batch(model.config, tree_bytes(model.params), memory(), options.batch_size, length, name=name)


def _answers(model: Model, policy: Policy) -> Any:
    fold = jnp.asarray(model.token_map, jnp.int32)

    @jax.jit
    def likeliest(params: Any, ids: jax.Array, at: jax.Array) -> jax.Array:
        hidden = features(params, model.config, policy, ids, None, fold).hidden
        return jnp.argmax(head_logits(jnp.take_along_axis(hidden, at[..., None], axis=1), params.head), axis=-1)

    def answer(batch: Batch) -> np.ndarray:
        # Of the answers' places alone: a long row's logits would be the largest array by far.
        at = np.stack([np.flatnonzero(row) for row in batch.weights]).astype(np.int32)
        told = np.full(batch.ids.shape, -1, np.int32)
        np.put_along_axis(told, at, np.asarray(likeliest(model.params, jnp.asarray(batch.ids), jnp.asarray(at))), axis=1)
        return told

    return answer


def recall(model: Model, policy: Policy, task: str, length: int, hay: np.ndarray, options: Eval) -> list[float]:
    """At each depth the share of rows whose whole answer is the likeliest."""
    answer, size, found = _answers(model, policy), options.batch_size, []
    for n, depth in enumerate(options.depths):
        right = []
        for start in range(0, options.rows, size):
            rng = np.random.default_rng((options.seed, TASKS.index(task), length, n, start))
            first = rng.integers(0, max(len(hay) - length, 1), size).tolist()
            made = [make_row(task, _stretch(hay, at, length), length, model.config.vocab_size, depth, rng) for at in first]
            batch = to_task_batch(made)
            right.append(task_accuracy(answer(batch), batch)[: options.rows - start])
        found.append(float(np.concatenate(right).mean()))
    return found


def _stretch(hay: np.ndarray, at: int, length: int) -> np.ndarray:
    return np.take(hay, np.arange(at, at + length), mode="wrap")


def evaluate(options: Eval) -> dict[str, Any]:
    """Everything that `dsv41 eval` prints, NaN where there was nothing to measure; `UserError` for what cannot be scored."""
    model = load_model(options.checkpoint)
    _check(options, model)
    policy = PACKED if options.packed else Policy()
    if options.dense:
        dense = dense_selection(model.config, max((options.length, *options.lengths)))
        model = Model(model.params, dense, model.tokenizer, model.token_map, model.step)
    _, documents = split_corpus(load_corpus(own_data(options.checkpoint) if options.data is None else options.data))
    ids = encode_documents(model.tokenizer, documents)
    packed = pack(ids, options.length, model.config.document_alignment)
    state = TrainState(model.params, None, jnp.int32(model.step))
    step = make_eval_step(model.config, policy, model.token_map)
    found = score(step, state, packed, options.batch_size, token_bytes(model.tokenizer))
    few = Packed(*(a[: max(1, _DIAGNOSED_TOKENS // options.length)] for a in packed))
    inside = make_diagnose(model.config, policy, model.token_map)(model.params, *map(jnp.asarray, few))
    hay = np.concatenate(ids)
    table = [
        {"task": task, "length": length, "depth": depth, "accuracy": accuracy}
        for task in options.tasks
        for length in options.lengths or (options.length,)
        for depth, accuracy in zip(options.depths, recall(model, policy, task, length, hay, options), strict=True)
    ]
    return {
        "step": model.step,
        "bits_per_byte": found.bits_per_byte,
        "nats_per_token": found.nats_per_token,
        "tasks": table,
        "inside": {name: float(value) for name, value in jax.device_get(inside).items()},
    }


def dense_selection(config: ModelConfig, length: int) -> ModelConfig:
    """A selection and a pool that take every entry of ``length`` tokens, for the same weights."""
    blocks = -(-length // config.candidate_block_size) + 1
    return configure(config, index_topk=length, candidate_topk_blocks=max(blocks, config.candidate_topk_blocks))


def run(options: Eval) -> int:
    """Prints `evaluate`'s findings, as tables or JSON; 0."""
    found = evaluate(options)
    if options.json:
        print(to_json(found))
        return 0
    print(f"step {found['step']}, held-out bits per byte: {found['bits_per_byte']:.4f}")
    cells = {(row["task"], row["length"], row["depth"]): row["accuracy"] for row in found["tasks"]}
    kinds = dict.fromkeys((task, length) for task, length, _ in cells)
    if kinds:
        columns = ["task", "length", *(f"depth {depth:g}" for depth in options.depths)]
        rows = [[task, f"{length}", *(f"{cells[task, length, d]:.2f}" for d in options.depths)] for task, length in kinds]
        print_table(columns, [(row, None) for row in rows], "rows whose whole answer is the likeliest", right=columns[1:])
    inside = [([name, f"{value:.4f}" if math.isfinite(value) else "-"], None) for name, value in found["inside"].items()]
    if inside:
        print_table(["inside", "value"], inside, "means over held-out rows", right=["value"])
    return 0
