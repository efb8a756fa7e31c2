"""Console output: one line per step in fixed columns, and a progress bar on a terminal."""

from __future__ import annotations

import functools
import logging
import math
import textwrap
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.control import Control
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

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


class ConsoleTracker:
    """Prints one line per step: to the log, or above a progress bar if the console is a terminal.

    Metrics that were not measured are shown as "-". Mean rewards of evaluation sets follow the columns.
    """

    def __init__(self, *, num_steps: int | None = None, console: Terminal | None = None) -> None:
        self._console = console or terminal()
        self._lines = 0
        self._titles_at: int | None = None
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
                console=self._console, transient=True,
            )  # fmt: skip
            self._task = self._progress.add_task("step", total=num_steps)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Print one step."""
        written = self._lines if self._progress is None else self._console.num_written
        if self._titles_at is None or written - self._titles_at >= HEADER_EVERY:
            self._titles_at = written
            self._print(format_header())
        self._lines += 1
        self._print(format_line(step, metrics))
        if self._progress is not None:
            self._progress.start()
            self._progress.update(self._task, completed=step)

    def close(self) -> None:
        """Remove the progress bar."""
        if self._progress is not None:
            self._progress.stop()

    def _print(self, text: str) -> None:
        if self._progress is None:
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
