"""The model card of a trained model: base model, command, data, and the curve of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from furlong.tracking.console import is_eval_mean
from furlong.tracking.curves import Panel, svg_of
from furlong.version import __version__

CARD, CURVE = "README.md", "curve.svg"
REWARD, LOSS = "rollout/raw_reward", "train/loss"
MAX_ROWS = 12  # of the table

Steps = Sequence[tuple[int, Mapping[str, float]]]


def write_card(
    folder: Path, *, name: str, base: str, algorithm: str, command: str, data: Mapping[str, str], steps: Steps
) -> None:
    """Write `README.md` and `curve.svg` into the folder of a model, from the recorded steps of its run.

    data: what the files were used for, by file.
    """
    metrics = list(dict.fromkeys(metric for _, row in steps for metric in row if is_eval_mean(metric)))
    metrics += [REWARD] if any(REWARD in row for _, row in steps) else [LOSS]
    curves = {metric: [(step, row[metric]) for step, row in steps if metric in row] for metric in metrics}
    (folder / CURVE).write_text(svg_of([Panel(metric, {name: points}) for metric, points in curves.items() if points]))
    shown = [(step, row) for step, row in steps if metrics[0] in row]
    if len(shown) > MAX_ROWS:
        shown = [shown[round(i * (len(shown) - 1) / (MAX_ROWS - 1))] for i in range(MAX_ROWS)]
    table = [["step", *metrics], ["---:"] * (len(metrics) + 1)]
    table += [[str(step), *(f"{row[m]:.4g}" if m in row else "" for m in metrics)] for step, row in shown]
    last = steps[-1][0] if steps else 0
    lines = [
        *("---", "library_name: transformers", f"tags: [furlong, {algorithm}]", "---", ""),
        *(f"# {name}", "", f"`{base}`, trained for {last} steps ({algorithm}) with furlong {__version__}.", ""),
        *("```bash", command.replace(" --", " \\\n  --"), "```", ""),
        *("| data | used for |", "|---|---|", *(f"| `{file}` | {use} |" for file, use in data.items()), ""),
        *(f"![{', '.join(metrics)} by step]({CURVE})", "", *(f"| {' | '.join(cells)} |" for cells in table), ""),
    ]
    (folder / CARD).write_text("\n".join(lines), encoding="utf-8")
