"""Display of a run in a notebook: a summary with curves, which is updated while the run is in progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from furlong.errors import ConfigError
from furlong.files.atomic import write_atomically
from furlong.tools.run_diff import summarize
from furlong.tools.run_plot import panels_of, svg_of

REFRESH_S = 2.0  # between two updates of a live display


class Picture:
    """An SVG picture, which notebooks display. `save` writes it to a file."""

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: Path | str) -> None:
        """Write the picture; its name must end with .svg. Raises ConfigError otherwise, or if it cannot be written."""
        path = Path(path)
        if path.suffix != ".svg":
            raise ConfigError(f"{path}: pictures are SVG; use {path.with_suffix('.svg')}")
        try:
            write_atomically(path, self.svg)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another file") from error


def plot_runs(folders: Sequence[Path], metrics: Sequence[str] = ()) -> Picture:
    """Draw curves of runs (see `tools.run_plot`). Raises ConfigError like `panels_of`."""
    return Picture(svg_of(panels_of(folders, metrics)))


def run_html(folder: Path, *, num_steps: int | None = None) -> str:
    """Return a table of a run's numbers and its curves as HTML, in which names are escaped."""
    summary = summarize(folder)
    cells = {"run": summary.name, "step": f"{summary.num_steps}{f' of {num_steps}' if num_steps else ''}"}
    if summary.reward is not None:
        cells["reward"] = f"{summary.reward[0]:.3f} to {summary.reward[1]:.3f}"
    for name, (first, best, step) in summary.evaluations.items():
        cells[f"eval {name}"] = f"{first:.3f} at first, best {best:.3f} at step {step}"
    if summary.step_s is not None:
        cells["s/step"] = f"{summary.step_s:.2f}"
    if summary.diagnoses:
        cells["diagnoses"] = ", ".join(summary.diagnoses)
    heads = "".join(f"<th>{escape(name)}</th>" for name in cells)
    values = "".join(f"<td>{escape(value)}</td>" for value in cells.values())
    table = f"<table><thead><tr>{heads}</tr></thead><tbody><tr>{values}</tr></tbody></table>"
    return table + (plot_runs([folder]).svg if summary.num_steps or summary.evaluations else "")


class LiveDisplay:
    """The output of a notebook cell that shows a run in progress. `refresh` is called from the cell's thread."""

    def __init__(self, folder: Path, num_steps: int | None, show: Callable[..., Any]) -> None:
        self._folder, self._num_steps = folder, num_steps
        self._handle: Any = show(self._content(), raw=True, display_id=True)
        self._stamp = ""

    def refresh(self) -> None:
        """Update the output if the run has recorded something new."""
        content = self._content()
        if (html := content["text/html"]) != self._stamp:
            self._stamp = html
            self._handle.update(content, raw=True)

    def _content(self) -> dict[str, str]:
        return {"text/html": run_html(self._folder, num_steps=self._num_steps), "text/plain": str(self._folder)}


def open_display(folder: Path, num_steps: int | None) -> LiveDisplay | None:
    """Return the display of a run; None outside of notebooks. IPython is not imported: a notebook has it."""
    ipython: Any = sys.modules.get("IPython")
    if ipython is None:
        return None
    shell: Any = ipython.get_ipython()
    if shell is None or getattr(shell, "kernel", None) is None:
        return None
    return LiveDisplay(folder, num_steps, ipython.display.display)
