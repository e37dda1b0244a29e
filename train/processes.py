"""One run by several processes, as a rule one a host, each with an equal part of the mesh's devices (`jax.distributed`).

All of them compute the same steps and read the same text; the first alone writes the run's folder, but for the arrays of
checkpoints, of which each writes its own parts. The folder is one that all of them see.
"""

import atexit
import hashlib
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint.multihost import get_barrier_sync_fn

from dsv41.errors import UserError
from dsv41.files import locked

# Seconds: for all processes to come, for those left to end when one has died, and for all to read, compile or write.
PATIENCE, HEARTBEAT, WORK = 90, 60, 3600
GRACE = 5  # seconds, for what all do at once
LOST = 3  # exit code
# What collectives and barriers say of a process that is gone.
_DEATH = re.compile(r"Gloo|NCCL|heartbeat|Barrier|UNAVAILABLE|DEADLINE_EXCEEDED|Connection (?:closed|reset)")
_PLACE = re.compile(r"([0-9]{1,6})/([0-9]{1,6})@(\S+:([0-9]{1,5}))")


def parse_place(text: str) -> tuple[int, int, str]:
    """Of ``"0/2@HOST:PORT"`` the number, the count and the address; raises `UserError` for another form."""
    found = _PLACE.fullmatch(text)
    if not found or not int(found[1]) < int(found[2]) or not 0 < int(found[4]) < 2**16:
        raise UserError(
            f"process: found {text!r}, allowed is NUMBER/COUNT@HOST:PORT with NUMBER from 0 and PORT from 1 to 65535, as "
            "'0/2@10.0.0.1:9876'"
        )
    return int(found[1]), int(found[2]), found[3]


def join(text: str, patience: int = PATIENCE) -> None:
    """Joins the others of ``"0/2@HOST:PORT"``: this process's number, how many there are, where the first one listens.

    To be called before anything else asks for a device. Raises `UserError` for another form. Where not all come within
    ``patience`` seconds, the process ends with one line and exit code 2; where one of them dies later, `together` ends
    the others, or where nothing fails JAX does when heartbeats are missed, by an abort.
    """
    number, count, address = parse_place(text)

    def give_up() -> None:
        told = f"process: waited {patience} s, allowed are all {count} processes; the first is asked for at {address}"
        print(f"dsv41: error: {told}", file=sys.stderr, flush=True)
        os._exit(2)

    timer = threading.Timer(patience, give_up)
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            address,
            count,
            number,
            initialization_timeout=2 * patience,  # JAX's own end is an abort
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=HEARTBEAT,
        )
    finally:
        timer.cancel()


@contextmanager
def together() -> Iterator[None]:
    """Ends this process where what runs in it fails because another has died: with one line and exit code `LOST`.

    Not by an exception: at its end JAX would wait for the dead until their heartbeat is missed, and abort. So would it where
    this process fails alone; its exception goes on, and behind the last line about it the process ends without JAX's wait.
    """
    try:
        yield
    except Exception as error:
        if not several():
            raise
        if isinstance(error, UserError) or not _DEATH.search(str(error)):
            if not _all_within("failed", GRACE):
                atexit.register(os._exit, 2 if isinstance(error, UserError | OSError) else 1)
            raise
        told = f"process: lost another of {jax.process_count()}; start all again, and they go on from the newest checkpoint"
        print(f"dsv41: error: {told}", file=sys.stderr, flush=True)
        os._exit(LOST)


@contextmanager
def agreed(name: str) -> Iterator[None]:
    """For what each process prepares by itself: where one finds bad input, all of them raise, and none waits for it."""
    problem = None
    try:
        yield
    except (UserError, OSError) as error:
        problem = error
    if several():
        meet(name)
        failed = np.flatnonzero(multihost_utils.process_allgather(np.int32(problem is not None)))
        if problem is None and failed.size:
            problem = UserError(
                f"process: found bad input in process {failed[0]} of {jax.process_count()}, which says what it is"
            )
    if problem is not None:
        raise problem


def check_shared(folder: Path) -> None:
    """Raises `UserError` in every process where one does not see what the first one writes into ``folder``; all of them ask."""
    if not several():
        return
    seen = folder / f".seen-{multihost_utils.broadcast_one_to_all(np.int32(os.getpid()))}"
    try:
        with agreed("folder written"):
            if leads():
                folder.mkdir(parents=True, exist_ok=True)
                seen.touch()
        with agreed("folder"):
            # A file system that hosts share may take a while to show what another has written.
            until = time.monotonic() + GRACE
            while not seen.exists():
                if time.monotonic() > until:
                    raise UserError(
                        f"out: found {str(folder)!r} apart from the first process's, allowed is a folder that all see"
                    )
                time.sleep(0.1)
    finally:
        if leads():
            seen.unlink(missing_ok=True)


def several() -> bool:
    """Whether there are others."""
    return jax.process_count() > 1


def leads() -> bool:
    """Whether this process is the one that writes."""
    return jax.process_index() == 0


def meet(name: str) -> None:
    """Returns when all processes are here: ahead of new programs, whose first collectives wait no more than 30 s on CPU."""
    wait: Any = get_barrier_sync_fn() if several() else None
    if wait is not None:
        wait(key=f"dsv41 {name}", timeout_ms=1000 * WORK)


def _all_within(name: str, seconds: int) -> bool:
    """Whether all processes come here so soon."""
    wait: Any = get_barrier_sync_fn()
    try:
        wait(key=f"dsv41 {name}", timeout_ms=1000 * seconds)
    except Exception:
        return False
    return True


def any_of(flag: bool) -> bool:
    """Whether ``flag`` is set in any process; all of them ask."""
    return bool(np.any(multihost_utils.process_allgather(np.int32(flag)))) if several() else flag


def check_equal(facts: Any) -> None:
    """Raises `UserError` in every process where one has other JSON ``facts`` than the first; all of them ask."""
    if not several():
        return
    digest = np.frombuffer(hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest(), np.int32)
    rows = multihost_utils.process_allgather(digest)
    other = [n for n, row in enumerate(rows) if not np.array_equal(row, rows[0])]
    if other:
        raise UserError(
            f"process: found other options, text or checkpoints in process {other[0]} than in process 0, allowed are the same"
        )


@contextmanager
def written(folder: Path) -> Iterator[Path]:
    """Where this process writes what goes into ``folder``: there, with others kept out of it, or if another process does, into
    one that is gone at the end."""
    if leads():
        with locked(folder):
            yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(scratch)
