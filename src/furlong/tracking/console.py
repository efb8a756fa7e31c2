"""Console output: one line per step in fixed columns, and what the run is doing, as a bar or a line each 30 s."""

from __future__ import annotations

import functools
import logging
import math
import textwrap
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.control import Control
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from furlong.core.progress import progress

logger = logging.getLogger("furlong.track")  # short, because it prefixes every line

HEADER_EVERY = 20  # lines, including log lines, so that the titles stay on the screen
LOG_WIDTH = 100
LOG_PREFIX = len("23:59:59 I : ") + len(logger.name)  # of machine.LOG_FORMAT
EVALUATION, EVALUATION_INDENT = "  eval ", 8


@dataclass(frozen=True)
class Column:
    """A column: its title, its metrics (the first that is present is shown), and its format."""

    title: str
    keys: tuple[str, ...]
    form: str = ".3f"
    width: int = 7


COLUMNS = (
    Column("reward", ("rollout/raw_reward",)),
    Column("length", ("rollout/response_len/mean",), ".1f"),
    Column("trunc", ("rollout/truncated_ratio",), ".2f", 5),
    Column("loss", ("train/loss",), ".4f", 8),
    Column("grad", ("train/grad_norm",)),
    Column("kl", ("train/kl_loss", "train/ppo_kl"), ".1e", 8),
    Column("tok/s", ("perf/tokens_per_gpu_per_sec",), ",.0f"),
    Column("time", ("perf/step_time",), ".2f", 7),
)


class Terminal(Console):
    """The console of log lines, steps and progress bar. Counts the lines written, except those of the bar.

    Only output through the progress bar's own console appears above the bar.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.num_written = 0

    def print(self, *objects: Any, **options: Any) -> None:
        """Print like `rich`."""
        self.num_written += not all(isinstance(item, Control) for item in objects)
        super().print(*objects, **options)


@functools.cache
def terminal() -> Terminal:
    """Return the terminal on this process's standard error, shared by all its users."""
    return Terminal(stderr=True)


class _Now(ProgressColumn):
    """The time that is left, and what the run is doing."""

    def render(self, task: Task) -> Text:  # noqa: ARG002  signature of rich
        """Return one line, which `rich` cuts at the edge of the terminal."""
        left = progress.seconds_left()
        parts = [f"{duration(left)} left"] if left else []
        return Text("  ".join([*parts, progress.text()]), style="cyan", no_wrap=True, overflow="ellipsis")


_shown = threading.Lock()  # held while the progress of this process is shown


@contextmanager
def show_progress(console: Terminal | None = None, *, every_s: float = 30.0) -> Generator[None]:
    """Show what the run is doing: as a bar on a terminal, otherwise as a line in the log each `every_s`.

    No effect within another such context.
    """
    if not _shown.acquire(blocking=False):
        yield
        return
    console = console or terminal()
    try:
        if not console.is_terminal:
            done = threading.Event()
            thread = threading.Thread(target=_log_progress, args=(done, every_s), name="furlong-progress", daemon=True)
            thread.start()
            try:
                yield
            finally:
                done.set()
                thread.join()
            return
        columns = (TextColumn("step"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), _Now())
        with Progress(*columns, console=console, transient=True, refresh_per_second=4) as bar:
            task = bar.add_task("step", total=None)
            _on_step.append(lambda: bar.update(task, completed=progress.last_step, total=progress.num_steps))
            try:
                yield
            finally:
                _on_step.clear()
    finally:
        _shown.release()


_on_step: list[Callable[[], None]] = []


def _draw() -> None:
    for show in _on_step:
        show()


def _log_progress(done: threading.Event, every_s: float) -> None:
    while not done.wait(every_s):
        left = progress.seconds_left()
        step = f"step {progress.last_step} of {progress.num_steps}" if progress.num_steps else "start"
        parts = [step, *([f"about {duration(left)} left"] if left else []), *filter(None, [progress.text()])]
        logger.info("%s", "; ".join(parts))


def duration(seconds: float) -> str:
    """Return a time as `45 s`, `6:10 min` or `2:05 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60}:{whole % 60:02} min" if whole < 3600 else f"{whole // 3600}:{whole % 3600 // 60:02} h"


class ConsoleTracker:
    """Prints one line per step: to the log, or above the bar of `show_progress` if the console is a terminal.

    Metrics that were not measured are shown as "-". Mean rewards of evaluation sets follow the columns.
    """

    def __init__(self, *, num_steps: int | None = None, console: Terminal | None = None) -> None:
        self._console = console or terminal()
        self._lines = 0
        self._titles_at: int | None = None
        progress.start(num_steps)
        _draw()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Print one step."""
        written = self._console.num_written if self._console.is_terminal else self._lines
        if self._titles_at is None or written - self._titles_at >= HEADER_EVERY:
            self._titles_at = written
            self._print(format_header())
        self._lines += 1
        self._print(format_line(step, metrics))
        progress.step(step)
        _draw()

    def close(self) -> None:
        """Do nothing: nothing is buffered."""

    def _print(self, text: str) -> None:
        if not self._console.is_terminal:
            logger.info("%s", wrap_line(text, LOG_WIDTH - LOG_PREFIX, LOG_WIDTH))
        else:
            width = self._console.width
            self._console.print(wrap_line(text, width, width), markup=False, highlight=False, soft_wrap=True)


def wrap_line(text: str, first_width: int, width: int) -> str:
    """Move the evaluations of a line below its columns if the line is too long."""
    if len(text) <= first_width:
        return text
    columns, *evaluations = text.split(EVALUATION)
    below = EVALUATION.join(["", *evaluations]).lstrip()
    indent = " " * EVALUATION_INDENT
    wrapped = textwrap.fill(below, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return f"{columns.rstrip()}\n{wrapped}" if below else columns


def format_header() -> str:
    """Return the titles of the columns of `format_line`."""
    return " ".join([f"{'step':>6}", *(f"{column.title:>{column.width}}" for column in COLUMNS)])


def format_line(step: int, metrics: dict[str, float]) -> str:
    """Return the line of one step."""
    cells = [f"{step:>6}"]
    for column in COLUMNS:
        value = next((metrics[key] for key in column.keys if key in metrics), None)
        cells.append(f"{'-' if value is None else _format_cell(value, column):>{column.width}}")
    evaluations = {name.removeprefix("eval/"): value for name, value in metrics.items() if is_eval_mean(name)}
    cells.extend(f" eval {name}={_format_value(value, '.3f')}" for name, value in evaluations.items())
    return " ".join(cells)


def is_eval_mean(name: str) -> bool:
    """Return whether a metric is the mean reward of an evaluation set: `eval/aime`, but not `eval/aime-pass@2`."""
    is_derived = name.count("/") != 1 or name == "eval/step" or name.endswith("-truncated_ratio") or "-pass@" in name
    return name.startswith("eval/") and not is_derived


def _format_cell(value: float, column: Column) -> str:
    text = _format_value(value, column.form)
    return text if len(text) <= column.width else f"{value:.1e}"


def _format_value(value: float, form: str) -> str:
    if not math.isfinite(value):
        return str(value)
    text = format(value, form)
    return text if any(digit in text for digit in "123456789") else text.removeprefix("-")  # no "-0.0000"
