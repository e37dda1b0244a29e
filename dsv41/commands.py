"""What each command of `dsv41` takes: options with their defaults and help, which `dsv41.cli` reads and the libraries work by."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True)
class Bench:
    """Time kernels beside their floors and peers, steps of the engine, or say which implementation of an op runs and why."""

    what: tyro.conf.Positional[Literal["kernels", "explain", "decode", "prefill", "serve"]]
    """kernels: time the named ops, all without a name. explain: an op, then FIELD=VALUE of its case. decode: a step by context.
    prefill: prompts, with the decoder on all their rows and on the last ones. serve: the engine under random requests."""
    words: tyro.conf.Positional[tuple[str, ...]] = ()
    """Ops by name, such as sparse_attention; after explain also, for example, queries=128 heads=64; after decode and prefill
    contexts, as 4k 16k; after serve how many requests."""
    out: Path | None = None
    """Also write the times to this JSON file."""
    preset: str | None = None
    """Of decode, prefill and serve: random weights of toy (default), small or slice, or of forty, all layers at toy's widths."""
    checkpoint: Path | None = None
    """The folder of a run, in place of a preset."""
    batch: int | None = None
    """Requests at once: 1 in decode and 8 in serve where not given."""
    decoder_replay: Literal["full", "bounded", "halo"] = "bounded"
    """Rows of a prompt for the decoder layers, as in generate."""


@dataclass(frozen=True)
class Analyze:
    """Cache bytes, FLOPs, prefill cost, parameters and memory: by formula and, of this code's models, counted.

    Without --preset and --config, the release beside V4-Flash, V3.2 and V1 67B; with one, its parts.
    """

    what: tyro.conf.Positional[Literal["kv", "flops", "prefill", "params", "memory"]]
    """kv: cache bytes of a token. flops: of a decoded token. prefill: of a prompt. params. memory: a request's cache."""
    preset: str | None = None
    """One model: flash, slice, toy, small, v4-flash, v3.2 or v1."""
    config: Path | None = None
    """A config.json, or a folder that holds one."""
    contexts: str | None = None
    """Lengths in tokens, as 4k,64k,1m, or doublings, as 4k..1m; k is 1024."""
    json: bool = False
    """Print the rows as JSON."""
    csv: Path | None = None
    """Also write the rows to this CSV file."""
    plot: Path | None = None
    """Also draw them to this .png, .svg or .pdf file."""
    theme: Literal["light", "dark"] | None = None
    """Which pages the picture is for; light without it."""


@dataclass(frozen=True)
class Plan:
    """Show what each layer does, how many parameters it has and what it adds to the cache; or where weights lie on a mesh."""

    preset: str | None = None
    """A named configuration: flash (default), small, slice or toy."""
    config: Path | None = None
    """A config.json, or a folder that holds one."""
    mesh: str | None = None
    """Show where each weight lies on a mesh instead, as data=2,expert=4; no device is needed."""
    json: bool = False
    """Print the table as JSON."""


@dataclass(frozen=True)
class Train:
    """Train a model, or go on with the run in --out."""

    out: Path = Path("runs/train")
    """The run's folder: config, tokenizer, metrics, checkpoints, loss curve. What a run there began with need not be typed."""
    recipe: str | None = None
    """What is on when: toy (all of the release's inference, the default), small (one GPU), qat, long (rows become 16 times
    as long, so that a batch has 16 or more), or dspark, which trains a drafter for the model of the run --from."""
    source: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """Of dspark, the folder of the run to draft for, which stays as it is."""
    preset: str | None = None
    """A named configuration; the recipe's or toy where not given."""
    config: Path | None = None
    """A config.json in place of a preset."""
    data: tuple[str, ...] | None = None
    """Text files, folders, or stdlib: the standard library's source, also where not given."""
    steps: int | None = None
    """Steps in all, the recipe's or 1000 where not given; 0 for as many as --max-seconds allow."""
    batch_size: int | None = None
    """Rows a step; the recipe's or 4 where not given."""
    accumulate: int | None = None
    """Parts of a batch that go through the model one after another, to save memory: a divisor of its rows, 1 where not given."""
    length: int | None = None
    """Tokens a row; the recipe's or 256 where not given."""
    lr: float | None = None
    """Peak learning rate; the recipe's or 0.015 where not given."""
    seed: int | None = None
    """Seed of the initial weights and of the order of the data; 0 where not given."""
    checkpoint_every: int = 500
    """Steps between checkpoints; the last step always has one."""
    keep: int = 2
    """Newest checkpoints to keep."""
    max_seconds: float | None = None
    """Stop after so many seconds, with a checkpoint."""
    evaluate: bool = True
    """Score the held-out text before and after."""
    eval_every: int = 0
    """Steps between scores of the held-out text, of which the best one's checkpoint is kept in OUT/best; 0 for none."""
    dtype: str | None = None
    """Of the passes: float32 or bfloat16; masters and momenta are float32. The recipe's or float32 where not given."""
    remat: str | None = None
    """What the backward pass computes again to save memory: none, attention or block; the recipe's where not given."""
    index_teacher: str | None = None
    """Whose attention an indexer learns: own for its layer's (the default), served for the mean over its selection's readers."""
    qat_weights: tuple[str, ...] | None = None
    """In quantised phases, weights trained as released: fp4 (experts), fp8 (other linears), fp8_rows (Engram tables)."""
    z_loss: float | None = None
    """Weight of the mean squared log partition; 0 where not given."""
    engram_rows: int | None = None
    """Rows of each Engram table that keep momentum, so that a large table costs what its touched rows do; else 0, for all."""
    synthetic: float | None = None
    """Share of each batch's rows made into needle, recall and copy tasks; 0 where not given."""
    profile: str | None = None
    """Steps to trace, as 20:23, into OUT/profile."""
    tensorboard: bool = False
    """Also write TensorBoard events."""
    wandb: str | None = None
    """Also log to this Weights & Biases project; a resume goes on with the same run."""
    mesh: str | None = None
    """Devices by axis, as data=2,expert=4: data, fsdp, expert, context and model; one device where not given."""
    process: str | None = None
    """This process of several, as 0/2@HOST:PORT: its number, how many there are, where the first one listens."""


@dataclass(frozen=True)
class Compile:
    """Lower a step for a mesh without its devices: one device's bytes, and what it sends of each collective."""

    mesh: str
    """Devices by axis, as fsdp=8,expert=8."""
    preset: str | None = None
    """A named configuration: flash (default), small, slice or toy."""
    config: Path | None = None
    """A config.json, or a folder that holds one."""
    rows: int = 1
    """Rows for each device along data, fsdp and expert."""
    length: int = 4096
    """Tokens a row; of prefill and decode, those that the cache has room for."""
    step: Literal["train", "prefill", "decode"] = "train"
    """A training step, a chunk of 256 tokens of each prompt, or a decode step."""
    platform: Literal["cuda", "tpu"] = "cuda"
    """What it is lowered for."""
    topology: str | None = None
    """Devices by name and number in place of --platform, as h200x64; here: those of this machine, for which it is compiled."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class Eval:
    """Score a run: bits per byte of held-out text, tasks by length and depth, what its selections catch."""

    checkpoint: Path
    """The folder of a run that `dsv41 train` or `dsv41 convert` wrote."""
    data: tuple[str, ...] | None = None
    """Text whose held-out part is scored, and is the tasks' hay: files, folders, or stdlib; the run's own where not given."""
    length: int = 256
    """Tokens a row of text."""
    batch_size: int = 4
    """Rows at a time."""
    tasks: tuple[str, ...] = ("needle",)
    """needle, recall (of one among eight keys) and copy; nothing for none."""
    lengths: tuple[int, ...] = ()
    """Tokens a row of a task; --length where not given."""
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Where in its row an answer stands: 0 at the beginning, 1 just before the question."""
    rows: int = 16
    """Rows of each task, length and depth."""
    seed: int = 0
    """Seed of the tasks."""
    packed: bool = False
    """With the caches' FP4 and FP8 rows."""
    dense: bool = False
    """Read every visible entry in place of the selected ones."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class Generate:
    """Continue prompts with a trained model; several prompts run as one batch."""

    checkpoint: Path
    """The folder of a run that `dsv41 train` or `dsv41 convert` wrote, or of released weights."""
    prompt: tuple[str, ...] = ()
    """One or more texts to continue."""
    prompts_file: Path | None = None
    """A file of prompts: one a line, or in a .jsonl file a JSON string or {"prompt": ...} a line."""
    max_new_tokens: int = 64
    """New tokens at most."""
    temperature: float = 0.0
    """0 for the likeliest token, else how freely to draw."""
    top_k: int = 0
    """Draw from so many likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that hold this share of the probability."""
    min_p: float = 0.0
    """Draw from tokens at least this share as likely as the likeliest."""
    seed: int = 0
    """Seed of each prompt's draws, which do not depend on the other prompts."""
    stop: tuple[str, ...] = ()
    """Texts that end a continuation."""
    packed: bool = False
    """Keep the cache in the release's FP4 and FP8 rows."""
    decoder_replay: Literal["full", "bounded", "halo"] = "full"
    """Rows of a prompt for the decoder layers: all; the last window's, about half the work of a long prompt but an
    approximation; or enough of them for the result of all."""
    prefix_cache: Path | None = None
    """A .db or .sqlite file to keep what prompts leave behind in, and to begin with what earlier ones left; made where there is
    none."""
    mesh: str | None = None
    """Devices by axis, as data=2,expert=2,model=2; one device where not given."""
    draft: Literal["off", "fixed", "threshold", "scheduled"] = "off"
    """Verify drafts of the next tokens, which changes the speed alone: fixed verifies as many each time, threshold those that the
    drafter trusts, scheduled those that pay by the measured cost of a step."""
    draft_length: int | None = None
    """Drafts of fixed; all of a block where not given."""
    draft_threshold: float = 0.5
    """The least probability of threshold."""
    json: bool = False
    """Print a JSON object a line, the last one on speed."""


@dataclass(frozen=True)
class Serve:
    """Serve a trained model to OpenAI's clients: completions and chat, whole or streamed."""

    checkpoint: Path
    """The folder of a run that `dsv41 train` or `dsv41 convert` wrote, or of released weights."""
    host: str = "127.0.0.1"
    """Address to listen on; this machine alone without it. 0.0.0.0 for every network, and then with a key."""
    port: int = 8000
    """Port to listen on; 0 for any that is free."""
    name: str | None = None
    """What clients call the model; the folder's name where not given."""
    api_key: str | None = None
    """Key that clients must send; $DSV41_API_KEY where not given, which unlike an option is in no list of processes."""
    slots: int = 8
    """Requests that are continued at once; others wait."""
    longest: int = 8192
    """Tokens of a request, prompt and answer; the model's own limit where that is less."""
    pages: int | None = None
    """Pages of 128 tokens of the cache; as many as the longest requests in all slots need where not given."""
    mesh: str | None = None
    """Devices by axis, as data=2,expert=2,model=2, of which slots and pages are cut by the first two, and by fsdp; else one."""
    packed: bool = False
    """Keep the cache in the release's FP4 and FP8 rows."""
    decoder_replay: Literal["full", "bounded", "halo"] = "full"
    """Rows of a prompt for the decoder layers, as of dsv41 generate."""
    prefix_cache: Path | None = None
    """A .db or .sqlite file to keep what prompts and answers leave behind in; with it prompts also begin with pages and windows
    of others."""
    prefix_gib: float = 8.0
    """Size of that file at most."""
    max_requests: int = 256
    """HTTP requests at once; more are told to come back."""
    max_body: int = 8 * 2**20
    """Bytes of a request's body."""
    timeout: float = 600.0
    """Seconds that a request may take."""


@dataclass(frozen=True)
class Verify:
    """Check recorded tensors, or a released checkpoint's names and shapes, against this code."""

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER...")]
    """A released checkpoint, a model folder with recorded numbers, or a folder of such folders."""
    json: Path | None = None
    """Also write the results to this file."""
    skip: tuple[str, ...] = ()
    """Names or patterns of files to leave out, as fp32_len7 or 'quant_*'."""
    all: bool = False
    """Print every row, not only the failed and skipped ones."""


@dataclass(frozen=True)
class Demo:
    """Train the toy on the standard library, restore it in a new process and let it write code."""

    seconds: float = 300.0
    """Seconds until training ends, reading and compiling included; scoring, timing and generating come on top."""
    out: Path = Path("runs/demo")
    """Folder of the run and of report.md."""


@dataclass(frozen=True)
class Convert:
    """Turn released weights into a run folder, or a run folder into released weights."""

    src: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
    """A folder of released weights (config.json, *.safetensors), or the folder of a run (config.json, checkpoints/)."""
    dst: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DST")]
    """The folder to make, of the other kind: a run where SRC holds released weights, and the other way round."""
    dry_run: bool = False
    """Print what would become of each tensor, and write nothing."""
    quantize: Literal["release", "bf16", "fp32"] | None = None
    """How to write weights: as the release stores them, or plain; as config.json says where not given."""
    layers: str | None = None
    """The first layers alone, as 0-4; all where not given."""
    draft_stages: int | None = None
    """0 leaves the draft stages out; all where not given."""
    vision: bool = True
    """Take the vision tower, aligner and image vectors along."""
