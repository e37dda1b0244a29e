"""What a run is doing, on standard error: a live line on a terminal, elsewhere a plain line a phase and every few seconds."""

import math
import time
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

_PLAIN_SECONDS = 10.0


class _Clock(ProgressColumn):
    """How long a phase has lasted, or how long the steps will."""

    def render(self, task: Task) -> Text:
        seconds = task.elapsed if task.total is None else task.time_remaining
        return Text("" if seconds is None else f"{timedelta(seconds=int(seconds))}{'' if task.total is None else ' left'}")


class Report:
    """A context in which phases and steps are shown."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(16), _Clock())
        self._progress = Progress(*columns, console=self.console, transient=True, refresh_per_second=5)
        self._task = self._progress.add_task("", total=None)
        self._name = ""
        self._stepping = False
        self._said = -math.inf

    def __enter__(self) -> "Report":
        if self.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self._progress.stop()

    def phase(self, name: str, quiet: bool = False) -> None:
        """What is done from now on, without a known end.

        quiet: shown on a terminal alone, where the line goes away: input may yet be bad, and that is to be one line everywhere.
        """
        self._name, self._stepping = name, False
        self._progress.reset(self._task, total=None, description=name)
        if not self.console.is_terminal and not quiet:
            self.say(name)

    def part(self, done: int, total: int) -> None:
        """So much of the phase is done."""
        self._progress.update(self._task, completed=done, total=total, description=f"{self._name}  {done}/{total}")

    def say(self, line: str) -> None:
        """A line that stays."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def step(self, done: int, total: int, loss: float, rate: float) -> None:
        """A training step is done. total: 0 while it is not known."""
        of = f"{done}/{total}" if total else f"{done}"
        if not self._stepping:
            self._stepping = True
            self._progress.reset(self._task)
        line = f"step {of}  loss {loss:.3f}  {rate:,.0f} tokens/s"
        self._progress.update(self._task, completed=done, total=total or None, description=line)
        now = time.monotonic()
        if not self.console.is_terminal and (now - self._said > _PLAIN_SECONDS or done == total):
            self._said = now
            self.say(line)
